"""The rows of the matrix. Numbers of ranks: those on which an outcome can differ; an uneven one, and a pair."""

import parity_case as at
import pytest
from parity_case import row

SLOW = (pytest.mark.slow,)
TICKETS, MINI = {"data__balance": "dynamic"}, {"data__balance": "lb_mini"}
UNTIED = {"model__config__tie_word_embeddings": "false"}
NO_CACHE = {"comm__zero_copy": "off", "comm__parameter_cache_bytes": 0}
CHECKPOINTING = {"model__gradient_checkpointing": "true"}
#: Layers with a state and with attention.
HYBRID = {"model__config__model_type": "qwen3_5_text", "model__config__num_hidden_layers": 2,
          "model__config__layer_types": "[linear_attention,full_attention]", "model__config__linear_num_value_heads": 4,
          "model__config__linear_num_key_heads": 2, "model__config__linear_key_head_dim": 16,
          "model__config__linear_value_head_dim": 16, "model__config__head_dim": 16, "loss": 2e-5,
          "close": (2e-5, 2e-5)}  # fmt: skip

SFT = [
    row("local sort", 2, 4, data__balance="local_sort", comm__prefetch=2, **UNTIED),
    row("micro", 1, 3, data__balance="lb_micro", comm__prefetch=1, model__config__tie_word_embeddings="true"),
    row("mini", 2, 3, data__balance="lb_mini", comm__prefetch=0, model__config__tie_word_embeddings="true"),
    row("dynamic", 1, 2, 4, data__balance="dynamic", comm__prefetch=2, **UNTIED),
    row("frozen embedding", 3, freeze=("embed_tokens",), data__balance="lb_mini", **UNTIED),
    row("frozen unit, recomputed", 2, freeze=("layers.1.",), comm__prefetch=2, **UNTIED, **CHECKPOINTING),
    row("frozen parts of units on each node", 4, using=(at.nodes_of_three,), comm__frozen_scope="node",
        freeze=("mlp", "layers.0.self_attn.q_proj"), data__balance="lb_mini"),
    row("frozen parts of units", 3, freeze=("mlp", "layers.0.self_attn.q_proj"), data__balance="lb_mini", **UNTIED),
    row("all units frozen", 2, freeze=("layers",), data__balance="lb_mini", **UNTIED),
    row("recomputed", 3, comm__prefetch=0, **CHECKPOINTING),
    row("learned cost", 3, data__balance="lb_mini", data__cost="fitted", run__steps=8),
    row("learned cost, tickets", 2, data__balance="dynamic", data__cost="fitted", run__steps=8),
    # A mailbox for about a tenth of a unit's gradient, and a different number of microbatches on each rank.
    row("mailbox", 2, 3, data__balance="lb_mini", comm__reduction="mailbox", comm__mailbox_bytes=2048),
    row("islands of which one spans two nodes", 4, using=(at.nodes_of_three,), islands__by=2),
    row("node cache", 4, using=(at.nodes_of_three,), data__balance="dynamic", comm__zero_copy="off"),
    row("bf16", 2, 3, model__param_dtype="bfloat16", loss=2e-2, close=None),
    row("one sequence", 1, 2, 3, 4, data__minibatch_sequences=1, then=(at.one_microbatch,)),
    row("evaluated", 3, evaluates=True, data__balance="lb_mini", **UNTIED),
    row("evaluated, tickets", 2, evaluates=True, data__balance="dynamic", data__eval_sequences=5, **UNTIED),
    row("unpacked", 3, using=(at.unpacked,), evaluates=True, data__balance="lb_mini", **UNTIED),
    row("hybrid in padded rows", 1, 2, 3, using=(at.long_padding,), then=(at.several_rows,), **HYBRID),
    row("unpacked, exact", 2, using=(at.unpacked,), evaluates=True, **TICKETS, run__exact="true", **UNTIED),
    row("fixed point", 3, data__balance="lb_mini", model__reduce_dtype="fixed64"),
    row("model in a directory", 2, 3, model__path="dense"),
    # A microbatch is one sequence, since the auxiliary loss is computed per microbatch.
    row("routers", 2, 3, model__path="experts", data__minibatch_sequences=1,
        model__config__output_router_logits=True, model__config__router_aux_loss_coef=0.5),
]  # fmt: skip

COMPILED = {"model__compile": "true", "run__steps": 2, "model__config__num_hidden_layers": 2,
            "data__minibatch_sequences": 4, **NO_CACHE}  # fmt: skip
TO_COMPILE = {"using": (at.without_kernels,), "then": (at.compiles,)}
PEFT = {"lora__r": 4, "lora__alpha": 16, "optim__warmup_steps": None, "run__steps": 4, "close": (1e-5, 1e-6)}
COMPILER = [
    row("compiled, recomputed", 2, marks=(pytest.mark.timeout(300),), **TO_COMPILE, **COMPILED, **CHECKPOINTING),
    row("compiled", 2, marks=SLOW, **TO_COMPILE, **COMPILED),
    row("compiled with adapters", 2, marks=SLOW, **TO_COMPILE, **PEFT | COMPILED),
]

EXPERT = {**PEFT, "data__balance": "lb_mini", "loss": 2e-5, "close": (1e-4, 1e-5)}
MIXTRAL = {"model__config__model_type": "mixtral", "model__config__num_local_experts": 4}
QWEN3 = {"model__config__model_type": "qwen3_moe", "model__config__num_experts": 4,
         "model__config__num_experts_per_tok": 2, "model__config__moe_intermediate_size": 24,
         "model__config__mlp_only_layers": "[0]", "lora__target_modules": "[q_proj]",
         "lora__target_parameters": "[mlp.experts.gate_up_proj,mlp.experts.down_proj,mlp.gate.weight]"}  # fmt: skip
GRANITE = {**MIXTRAL, "model__config__model_type": "granitemoe", "lora__target_modules": "[]",
           "lora__target_parameters": "[experts.gate_up_proj]"}  # fmt: skip
# On CPUs, bitsandbytes 0.50 dequantizes rows wrongly that are no multiple of 64.
IN_4_BITS = {"model__load_in_4bit": "true", "model__config__hidden_size": 64, "model__config__intermediate_size": 128}
NODES = {"using": (at.nodes_of_three,), "comm__frozen_scope": "node"}
#: Few trained parameters, so that bytes of the base show.
FEW = {**PEFT, **IN_4_BITS, "lora__r": 1, "lora__target_modules": "[q_proj]", "comm__node_cache": "off",
       "data__balance": "lb_mini"}  # fmt: skip
SAME = {**PEFT, "data__balance": "lb_mini", "optim__lr_scheduler_type": "constant", "microbatches": True}
ADAPTERS = [
    row("all linear", 3, **PEFT, data__balance="lb_mini", **UNTIED),
    row("adapters and whole modules", 2, **PEFT, data__balance="lb_mini", lora__target_modules="[q_proj,v_proj]",
        lora__modules_to_save="[lm_head,norm]", **UNTIED),
    row("adapters, tickets", 2, **PEFT, data__balance="dynamic", **UNTIED),
    row("dropout, recomputed", 2, **SAME | {"close": (1e-4, 1e-6)}, lora__dropout=0.3, **CHECKPOINTING),
    row("dropout", 3, **SAME | {"close": (1e-4, 1e-6)}, lora__dropout=0.3),
    # Sums in another order round to other activations: elements move by 3e-4, arrays by 3e-3 of their norm.
    row("bf16 base", 2, 3, **SAME | {"loss": 1e-3, "close": None}, model__param_dtype="bfloat16"),
    # peft adds experts and the router itself.
    row("mixtral, all linear", 2, num_trained=3 * (4 + 3) * 2, **EXPERT, **MIXTRAL),
    row("qwen3 with router", 3, num_trained=(3 + 2 * 3) * 2, **EXPERT, **QWEN3, **NO_CACHE),
    row("granite, recomputed", 2, num_trained=6, **EXPERT | GRANITE | NO_CACHE, **CHECKPOINTING),
    row("4 bits", 1, 2, 3, **PEFT | IN_4_BITS, data__balance="lb_mini"),
    row("4 bits, recomputed", 2, **PEFT | IN_4_BITS, **NO_CACHE, **CHECKPOINTING, model__bnb_4bit_quant_type="fp4",
        model__bnb_4bit_use_double_quant="false"),
    row("4 bits, bf16", 3, **SAME | IN_4_BITS | {"loss": 1e-3, "close": None}, model__param_dtype="bfloat16"),
    row("stored in 4 bits", 2, **PEFT | {"model__path": "in_4_bits"}, comm__zero_copy="off", comm__prefetch=2),
    row("base on each node", 4, **NODES, **PEFT, data__balance="lb_mini", comm__node_cache="off"),
    row("base on each node, cached", 4, **NODES, **PEFT, data__balance="dynamic"),
    row("4-bit base on each node", 3, 4, **NODES | {"using": (at.nodes_of_two,)}, **FEW,
        then=(at.fetches_base(False),), **CHECKPOINTING),
    row("4-bit base over all nodes", 4, **NODES | {"comm__frozen_scope": "world"}, **FEW,
        then=(at.fetches_base(True),)),
    row("one layer", 3, num_trained=4, **EXPERT,
        lora__target_modules="[q_proj,v_proj]", lora__layers_to_transform="[2]"),
]  # fmt: skip

CONTEXT = {"data__balance": "dynamic", "data__context_parallel": "auto"}
HALF = {"using": (at.splits(2),), "then": (at.splits_at_least(6),), **CONTEXT}
THIRD = {"using": (at.splits(3),), "then": (at.splits_at_least(6),), **CONTEXT}
ON_DEVICE = {**CONTEXT, "using": (at.mapped_device, at.splits(3)), "then": (at.splits_at_least(6), at.copied),
             "run__device": "cuda", "comm__window_device": "cpu"}  # fmt: skip
ADAPTED = {**PEFT, **CONTEXT, "optim__learning_rate": 0.1, "run__steps": 3, "using": (at.splits(3),), "loss": 1e-5,
           "then": (at.splits_at_least(1),), "close": (1e-3, 1e-4)}  # fmt: skip
SHORT_BF16 = {"data__balance": "dynamic", "model__param_dtype": "bfloat16", "run__steps": 3}
CONTEXT_PARALLEL = [
    row("chunks", 2, **HALF),
    row("chunks on a device", 3, **ON_DEVICE),
    row("chunks on a device, recomputed", 2, **ON_DEVICE, comm__zero_copy="off", **CHECKPOINTING),
    row("chunks, fetched late", 3, **THIRD, comm__prefetch=0),
    row("chunks on four ranks", 4, **HALF | {"using": (at.splits(4),)}, comm__prefetch=2, comm__zero_copy="off"),
    row("chunks, recomputed", 4, **THIRD, **CHECKPOINTING),
    row("chunks, mailbox", 3, **HALF, comm__zero_copy="off", comm__reduction="mailbox", **CHECKPOINTING),
    row("chunks, small mailbox", 4, **THIRD, comm__reduction="mailbox", comm__mailbox_bytes=4096),
    # Sums over chunks round to bf16 in other places: 4e-3 of each number, less of a loss.
    row("chunks, bf16", 3, like=SHORT_BF16, loss=5e-3, close=None, using=(at.splits(3),), then=(at.splits_at_least(1),),
        **SHORT_BF16 | CONTEXT),
    # If only queries have adapters, no gradients of keys and values are sent.
    row("chunks, queries", 3, **ADAPTED, lora__target_modules="[q_proj]"),
    row("chunks, keys and values", 3, **ADAPTED, lora__target_modules="[k_proj, v_proj]"),
    # Two sequences a minibatch: the longer one is split over the ranks, or takes all the time.
    row("a cut where it gains", 2, **CONTEXT, data__minibatch_sequences=2, data__cost="linear",
        then=(at.splits_at_least(3),)),
    # Sequences of up to 40 tokens, in chunks of at most 20.
    row("longer than a microbatch", 2, **CONTEXT, data__max_tokens_per_microbatch=20, then=(at.splits_at_least(1),)),
    row("chunks, slow rank and learned cost", 3, **THIRD | {"using": (at.splits(3), at.slow_attention)},
        data__cost="fitted"),
    row("window", 3, **CONTEXT, model__config__use_sliding_window="true", model__config__sliding_window=8,
        model__config__max_window_layers=1, run__steps=1, then=(at.stays_whole,)),
]  # fmt: skip

DEVICE = {"using": (at.unmapped_device,), "run__device": "cuda", "comm__window_device": "cuda",
          "data__balance": "lb_mini", "comm__zero_copy": "off"}  # fmt: skip
ADDS, ACCUMULATES = {"then": (at.copies_own_parts(True),)}, {"then": (at.copies_own_parts(False),)}
STAGED = {"using": (at.unmapped_device,), "then": (at.copied,), "run__device": "cuda", "comm__window_device": "cpu",
          "data__balance": "lb_mini"}  # fmt: skip
MAPPED = {"using": (at.mapped_device,), "then": (at.copies_peers,), "run__device": "cuda", "data__balance": "lb_mini",
          "comm__zero_copy": "off"}  # fmt: skip
ON_GPU = {"optim__device": "cuda"}
BY_ACCUMULATE = {"comm__reduction": "accumulate"}
BF16_DEVICE = {"using": (at.unmapped_device,), "loss": 2e-2, "close": None, "run__device": "cuda",
               "model__param_dtype": "bfloat16"}  # fmt: skip
DEVICES = [
    row("device", 2, 3, **DEVICE, **ADDS),
    row("device, zero copy", 2, **DEVICE | {"comm__zero_copy": "auto"}, **ADDS),
    row("device, only rank", 1, **DEVICE | {"comm__zero_copy": "auto"}, then=(at.moves_nothing,)),
    row("device, recomputed", 1, 3, **DEVICE, **ADDS, comm__prefetch=2, **CHECKPOINTING),
    row("device, accumulate", 3, **DEVICE, **ACCUMULATES, **BY_ACCUMULATE),
    row("device, mailbox", 3, **DEVICE, **ADDS, comm__reduction="mailbox", comm__progress="off",
        comm__mailbox_bytes=1 << 18),
    row("device, tickets", 2, **DEVICE | {"data__balance": "dynamic"}, **ACCUMULATES, **BY_ACCUMULATE, **ON_GPU,
        comm__progress="thread"),
    row("device, fixed point", 1, 2, **DEVICE, **ACCUMULATES, **BY_ACCUMULATE, **ON_GPU,
        model__reduce_dtype="fixed64"),
    row("staged", 2, **STAGED),
    row("staged, recomputed", 3, **STAGED, comm__prefetch=2, **CHECKPOINTING),
    row("staged, copied", 2, **STAGED, comm__zero_copy="off", comm__prefetch=0),
    row("staged, mailbox", 3, **STAGED, comm__zero_copy="off", comm__reduction="mailbox", comm__progress="thread"),
    row("staged, tickets", 2, **STAGED | {"data__balance": "dynamic"}, **ON_GPU),
    row("mapped device", 3, **MAPPED),
    row("mapped device, recomputed", 1, 2, **MAPPED, **ON_GPU, comm__prefetch=2, **CHECKPOINTING),
    row("mapped device, mailbox", 3, **MAPPED, comm__prefetch=0, comm__progress="off", comm__mailbox_bytes=1 << 18),
    row("mapped device, fixed point", 2, **MAPPED | {"data__balance": "dynamic"}, model__reduce_dtype="fixed64"),
    row("bf16, device staged", 3, **BF16_DEVICE, **BY_ACCUMULATE, comm__window_device="cpu"),
    row("bf16, device", 2, **BF16_DEVICE, **ON_GPU, comm__reduction="mailbox", comm__window_device="cuda"),
]  # fmt: skip

DPO = {"objective": "dpo", "evaluates": True, "using": (at.small_blocks,)}
KTO = {"objective": "kto", "evaluates": True}
REWARD = {"objective": "reward", "evaluates": True}
APART = {"islands__mode": "outer", "islands__by": 1, "islands__sync_every": 3, "run__steps": 8}
PREFERENCES = [
    row("dpo", 3, **DPO, data__balance="lb_mini"),
    row("dpo, tickets", 1, 2, **DPO, data__balance="dynamic"),
    row("dpo, unpacked", 2, **DPO | {"using": (at.small_blocks, at.unpacked)}, data__balance="dynamic", run__steps=3),
    row("kto", 3, **KTO, data__balance="lb_mini"),
    row("kto, tickets", 1, 2, **KTO, data__balance="dynamic"),
    row("kto, unpacked", 2, **KTO, using=(at.unpacked,), data__balance="dynamic", run__steps=3),
    row("apo", 2, **KTO, data__balance="dynamic", kto__loss_type="apo_zero_unpaired", run__steps=3),
    row("kto, islands", 2, objective="kto", data__balance="dynamic", islands__by=1),
    row("kto, islands of two", 4, **KTO, data__balance="lb_mini", islands__by=2),
    row("kto, islands apart", 2, 3, objective="kto", close=(1e-5, 1e-6), **APART),
    row("kto, islands of two apart", 4, objective="kto", close=(1e-5, 1e-6), data__balance="dynamic",
        **APART | {"islands__by": 2}),
    # With one pair per step, all ranks but one have none.
    row("reward, one pair", 3, **REWARD, data__balance="lb_mini", data__minibatch_sequences=1),
    row("reward, tickets", 1, 2, **REWARD, data__balance="dynamic"),
]  # fmt: skip

FRAGMENTS = {"islands__sync_every": 9, "islands__fragments": 3}
DELAYED = {"islands__delay": 2}
SHARED = {"islands__local_share": 0.5}
ISLANDS = [
    row("apart", 3, 4, **APART),
    row("apart, delayed", 2, **APART, **DELAYED),
    row("apart, own share", 2, **APART, **SHARED),
    row("apart, delayed, own share", 3, **APART, **DELAYED, **SHARED),
    row("apart, fragments", 2, **APART | FRAGMENTS),
    row("apart, fragments, delayed", 3, **APART | FRAGMENTS, **DELAYED),
    row("apart, fragments, own share", 4, **APART | FRAGMENTS, **SHARED),
    row("apart, all", 2, 4, **APART | FRAGMENTS, **DELAYED, **SHARED, data__balance="dynamic"),
    row("apart, by two", 4, **APART | FRAGMENTS | {"islands__by": 2}, **DELAYED, **SHARED, data__balance="lb_mini"),
    row("apart, by two, tickets", 4, **APART | FRAGMENTS | {"islands__by": 2}, **DELAYED, data__balance="dynamic"),
    row("apart, one on two nodes", 4, using=(at.nodes_of_three,), **APART | {"islands__by": 2}, comm__node_cache="off"),
]

PLAIN = [*SFT, *COMPILER, *ADAPTERS, *CONTEXT_PARALLEL, *DEVICES, *PREFERENCES, *ISLANDS]

USUAL = {"data__minibatch_sequences": 11, "data__eval_sequences": 9, "optim__adam_epsilon": 1e-8, "run__steps": 3}
COPIED = {"data__balance": "dynamic", "comm__zero_copy": "off"}
IN_PLACE = {"comm__reduction": "accumulate", "data__balance": "dynamic"}
BY_MAILBOX = {"comm__reduction": "mailbox", "comm__zero_copy": "off"}
PREFETCHED = {"comm__zero_copy": "off", "comm__prefetch": 2}
LORA = {"lora__r": 4}
CLIPPED, BF16 = {"optim__max_grad_norm": 0.1}, {"model__param_dtype": "bfloat16"}
PREFERENCE = {"run__steps": 3, "run__eval_on_start": True}
GRPO = {"objective": "grpo", "way": {}, "rl__loss_type": "dapo"}
NOT_STORED = {"rl__store_bytes": 0, "comm__reduction": "mailbox", "comm__prefetch": 0}
LITTLE_STORED = {"rl__store_bytes": 700, "comm__zero_copy": "off", "comm__prefetch": 2, "comm__gradient_cache_bytes": 0}
EXACT = [
    row("accumulate", 2, 4, way=BY_ACCUMULATE, **USUAL),
    row("mailbox", 2, 4, way={"comm__reduction": "mailbox"}, **USUAL),
    row("tickets, copied", 3, way=COPIED | {"comm__prefetch": 2}, **USUAL),
    row("mailbox, copied", 3, way=BY_MAILBOX | {"comm__prefetch": 0}, **USUAL),
    row("no cache", 3, way=NO_CACHE | {"comm__gradient_cache_bytes": 0}, **USUAL),
    row("learned cost", 3, way={"data__cost": "fitted", "comm__gradient_cache_bytes": 0}, **USUAL),
    row("bf16", 3, way=COPIED, **USUAL, **BF16),
    row("sgd, recomputed", 3, way=COPIED, **USUAL, **CHECKPOINTING, optim__optimizer="sgd", optim__momentum=0.9),
    row("dropout, tied", 3, way=COPIED, **USUAL, model__config__attention_dropout=0.2,
        model__config__tie_word_embeddings="true"),
    row("lora", 3, way=COPIED, **USUAL, **LORA, lora__dropout=0.1),
    row("lora, frozen layers computed once", 3, way=COPIED | {"comm__prefetch": 2}, **USUAL | {"run__steps": 7}, **LORA,
        lora__target_modules="[q_proj,v_proj]", lora__layers_to_transform="[2]", model__cache_frozen_prefix="true"),
    row("ranks without a microbatch", 2, 3, way=TICKETS, **USUAL | {"data__minibatch_sequences": 1}),
    row("slow ranks", 2, using=(at.slow_microbatches,), way=TICKETS | {"comm__prefetch": 2}, **USUAL),
    row("islands in place", 3, 4, way=IN_PLACE | {"islands__by": 1}, **USUAL, **CLIPPED),
    row("islands, mailbox, lora", 2, 3, way=BY_MAILBOX | {"islands__by": 1}, **USUAL, **LORA),
    row("islands, copied, bf16", 2, 3, way=PREFETCHED | {"islands__by": 1}, **USUAL, **BF16),
    row("islands of two in place", 4, way=IN_PLACE | {"islands__by": 2}, **USUAL, **CLIPPED),
    row("islands of two, mailbox, lora", 4, way=BY_MAILBOX | {"islands__by": 2}, **USUAL, **LORA),
    row("islands of two, copied, bf16", 4, way=PREFETCHED | {"islands__by": 2}, **USUAL, **BF16),
    row("dpo", 2, objective="dpo", way=MINI, **PREFERENCE),
    row("dpo, tickets", 3, objective="dpo", way=TICKETS, **PREFERENCE),
    row("kto", 2, objective="kto", way=MINI, **PREFERENCE),
    row("kto, adapters", 3, objective="kto", way=TICKETS, **PREFERENCE, **LORA),
    row("reward", 3, objective="reward", way=TICKETS, **PREFERENCE),
    row("reward, adapters", 2, objective="reward", way=TICKETS, **PREFERENCE, **LORA),
    row("4 bits", 2, 3, way=COPIED, **USUAL, **LORA, **IN_4_BITS),
    row("4 bits, islands, bf16", 2, way=PREFETCHED | {"islands__by": 1}, **USUAL, **LORA, **IN_4_BITS, **BF16),
    row("4 bits, reward", 2, objective="reward", way=TICKETS, **PREFERENCE, **LORA, **IN_4_BITS),
    row("dapo", 2, **GRPO, run__eval_every=2),
    row("grpo", 3, **GRPO | {"rl__loss_type": "grpo"}, rl__beta=0.1, rl__scale_rewards="none"),
    row("dr_grpo", 3, **GRPO | {"rl__loss_type": "dr_grpo"}, **BF16, rl__mask_truncated_completions="true"),
    row("dapo, adapters", 2, **GRPO, **LORA, rl__beta=0.1),
    row("dapo, 4 bits", 2, **GRPO, **LORA, **IN_4_BITS, rl__beta=0.1),
    row("dapo, nothing stored", 3, using=(at.slow_rollouts,), **GRPO | {"way": NOT_STORED}),
    row("dapo, little stored", 2, using=(at.slow_rollouts,), **GRPO | {"way": LITTLE_STORED}),
]  # fmt: skip
