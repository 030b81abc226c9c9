"""A result of `odc-mpi bench transport` made up for tests: memcpy takes 1 s for a unit of 10 GB, the others more."""

SLOWNESS = {
    "memcpy": 1.0,
    "fetch_zero_copy": 1e-6,
    "fetch_copy": 1.25,
    "mpi_allgather": 2.0,
    "push_accumulate": 2.5,
    "push_mailbox": 3.0,
    "mpi_reduce_scatter": 4.0,
}


def entry(name, size_bytes):
    time_s, moves = SLOWNESS[name], name != "fetch_zero_copy"
    speed = size_bytes / time_s / 1e9
    return {
        "seconds": {"low": time_s, "median": time_s, "high": time_s},
        "gb_per_s": {"low": speed * 0.9, "median": speed, "high": speed * 1.1} if moves else None,
        "of_memcpy": SLOWNESS["memcpy"] / time_s if moves else None,
    }


def result():
    entries = [
        {
            "size_bytes": size,
            "num_units": 1,
            "crossing_bytes": size // 2,
            "all_at_once": {name: entry(name, size) for name in SLOWNESS},
        }
        for size in (65536, 1 << 20, 10**10)
    ]
    return {
        "benchmark": "transport",
        "library": "Open MPI 5.0.11",
        "ranks": 2,
        "nodes": 1,
        "cores_per_rank": 1,
        "repeats": 7,
        "dtype": "float32",
        "load_average": [0.5, 2.04],
        "sizes": entries,
    }
