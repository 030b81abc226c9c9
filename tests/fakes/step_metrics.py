"""Metrics of a step, as in a line of metrics.jsonl."""

STEP = {
    "step": 1,
    "loss": 8.25,
    "grad_norm": 1.5,
    "learning_rate": 3e-4,
    "num_tokens": 900,
    "num_input_tokens": 1000,
    "step_s": 0.5,
    "tokens_per_s": 2000.0,
    "idle_fraction": 0.25,
    "microbatches_min": 2,
    "microbatches_max": 5,
    "slowest_rank": 3,
    "skipped": False,
    "fetch_wait_s": 0.01,
    "accumulate_wait_s": 0.02,
    "boundary_wait_s": 0.03,
}
