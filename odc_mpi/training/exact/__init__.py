"""Exact runs (`run.exact`), whose results are bitwise identical on any number of ranks. See docs/exact.md.

Gradients are summed as integers (`shard.gradient_format.fixed_point`). Microbatches do not depend on the ranks
(`data.plan.balance`), or contain a single prompt group (`training.rl.source`). The terms of reported
sums are either rounded so that the order of additions does not matter (`observe.callback.round_for_exact_sum`), or
added in the order of the prompts (`training.rl.metrics`).
"""
