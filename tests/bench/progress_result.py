"""A result of `odc-mpi bench progress` made up for tests, and its parts."""

from odc_mpi.bench.progress.benchmark import judge

LEFT_OUT = "3 of 8M took 13.1 s, a size has 10 s"


def get(**busy):
    medians = {"idle": 1e-3, "large_products": 2e-3, "small_operations": 3e-3, "python": 4e-3} | busy
    kinds = {
        name: {"median_s": median, "longest_s": 2 * median, "computed_s": float(name != "idle")}
        for name, median in medians.items()
    }
    return {"size_bytes": 1 << 20, "kinds": kinds}


def spread(median):
    return {"low": 0.9 * median, "median": median, "high": 1.1 * median}


def polite(**slow_down):
    slow_downs = {"accumulate": 0.032, "mailbox": 0.04} | slow_down
    return {
        "steps": 100,
        "seconds": {"without": spread(0.25)} | {name: spread(0.25 * (1 + one)) for name, one in slow_downs.items()},
        "slow_down": {name: spread(one) for name, one in slow_downs.items()},
    }


def push(of_put=0.5, **others):
    variants = {
        name: {"num_samples": 9, "seconds": spread(0.01), "gb_per_s": spread(0.84), "of_put": part}
        for name, part in {"put": 1.0, "accumulate": 0.02, "mailbox": of_put, **others}.items()
    }
    return {"size_bytes": 8 << 20, "variants": variants, "left_out": {}}


def result():
    last = push()
    last |= {"size_bytes": 32 << 20, "left_out": {"accumulate": LEFT_OUT}}
    del last["variants"]["accumulate"]
    read, politeness, pushed = [get()], polite(mailbox=0.06), [push(), last]
    return {
        "benchmark": "progress",
        "library": "Open MPI 5.0.11",
        "ranks": 2,
        "nodes": 2,
        "repeats": 9,
        "cores": [0, 1],
        "target": 1,
        "other_node": True,
        "mpich_async_progress": False,
        "load_average": [0.5, 2.04],
        "get": read,
        "politeness": politeness,
        "reduction": pushed,
        "goals": judge(read, politeness, pushed),
    }
