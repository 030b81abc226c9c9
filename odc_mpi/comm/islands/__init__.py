"""Islands of ranks, each with a full copy of the parameters, and the exchange between them (hybrid sharding)."""
