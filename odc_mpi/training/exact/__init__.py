"""`run.exact`: what a run takes to give the same result to the last bit on any number of ranks, and what breaks it.

docs/exact.md has the argument. Gradients are added up as integers (`shard.gradient_format.fixed_point`), minibatches are cut
by their sequences alone (`data.plan.rank_independent_packing`) or by prompt groups (`train.rl.source`), and floating-point numbers of
which a sum is reported are rounded so that their order does not matter (`observe.callback.summable`), or added up in
the order of the prompts (`train.rl.group_sums`).
"""
