"""`run.exact`: bitwise identical results on any number of ranks. docs/exact.md explains why.

Gradients are summed as integers (`shard.gradient_format.fixed_point`). Microbatches depend on the sequences only, not
on ranks (`data.plan.rank_independent_packing`), or contain one prompt group (`training.rl.source`). Reported sums are
of rounded numbers, for which the order does not matter (`observe.callback.round_for_exact_sum`), or are added in the
order of the prompts (`training.rl.group_sums`).
"""
