"""Every key of a run: its type, its default, its legal values, one line of meaning.

`settings.py` reads them: defaults, a YAML file, `key=value` words.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from research.problems import Problem, divisors, text_of

Scalar = int | float | bool | str | None
Value = Scalar | Sequence[Scalar]  # a key of several values holds a tuple; mappings, JSON and YAML have lists


def key(
    default: Any, meaning: str, at_least: float | None = None, at_most: float | None = None, path: bool = False
) -> Any:
    """A config key: its default, its one line of help, the closed range of a number, and whether it may name a file or
    folder, in which a leading `~` is somebody's home."""
    metadata = {"meaning": meaning, "at_least": at_least, "at_most": at_most, "path": path}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The decoder: sizes in elements, loss weights as plain factors."""

    vocab: int = key(256, "rows of the embedding and the head", at_least=1)
    dim: int = key(64, "width of the residual stream", at_least=1)
    layers: int = key(4, "decoder layers", at_least=1)
    heads: int = key(8, "query heads", at_least=1)
    norm: Literal["pre", "post", "output", "sandwich"] = key(
        "pre",
        "RMSNorm of each part's input (pre), output (output), both (sandwich), or of the sum with the residual (post)",
    )
    attention: Literal["gqa", "mla"] = key("gqa", "keys and values of kv_heads, or from one latent (DeepSeek-V2)")
    kv_heads: int = key(2, "key and value heads: heads = MHA, 1 = MQA, between = GQA; not for mla", at_least=1)
    head_dim: int = key(8, "elements of one head; of queries and keys, for mla", at_least=2)
    value_dim: int = key(8, "elements of one head of values (mla)", at_least=1)
    kv_latent: int = key(32, "elements that keys and values are made from (mla)", at_least=1)
    q_latent: int = key(0, "elements that queries are made from (mla); 0: from the residual stream itself", at_least=0)
    qk_norm: Literal["none", "head", "all"] = key(
        "none", "RMSNorm of queries and of keys, over each head (Qwen3) or over all together (OLMoE)"
    )
    qkv_bias: bool = key(False, "add a bias to queries, keys and values (Qwen2)")
    out_bias: bool = key(False, "add a bias to the output of attention")
    mlp_bias: bool = key(False, "add biases to dense feed-forwards; experts have none")
    window: int = key(0, "tokens that a token sees, itself included; 0: all before it", at_least=0)
    window_from: int = key(0, "first layer with the window; those before it see everything", at_least=0)
    ffn: int = key(128, "hidden width of a dense feed-forward", at_least=1)
    dense_layers: int = key(1, "leading layers with a dense feed-forward instead of MoE", at_least=0)
    moe_every: int = key(1, "of the other layers every n-th is MoE, those whose number from 1 it divides", at_least=1)
    experts: int = key(8, "routed experts of an MoE layer; 0 makes every layer dense", at_least=0)
    top_k: int = key(2, "experts that each token is routed to", at_least=1)
    expert_ffn: int = key(32, "hidden width of one expert", at_least=1)
    shared_experts: int = key(1, "experts that every token passes through", at_least=0)
    router_score: Literal["softmax", "sigmoid"] = key("softmax", "of the router's logits over all experts")
    normalize_weights: bool = key(
        True, "make the top-k routing weights of a token sum to 1; with softmax scores that is top-k before softmax"
    )
    weight_scale: float = key(1.0, "routing weights are multiplied with this", at_least=0)
    expert_groups: int = key(1, "groups of neighbouring experts, of which a token enters top_groups", at_least=1)
    top_groups: int = key(1, "groups that a token may enter: those with the best scores", at_least=1)
    group_best: int = key(1, "best experts whose scores add up to the score of a group", at_least=1)
    capacity: float = key(
        0.0, "choices that an expert takes of a global microbatch, over its even share; 0: all (dropless)", at_least=0
    )
    drop_by: Literal["position", "score"] = key(
        "position", "what a full expert drops: the last tokens, or those with the least routing weight"
    )
    load: Literal["routed", "even", "skewed", "worst"] = key(
        "routed",
        "who chooses experts: the router, or a token's number, so that all have as much to do, the first up to twice "
        "the mean and the last little, or the first top_k everything: to measure what a load costs",
    )
    balance: float = key(0.01, "weight of the load-balance loss (Switch Transformer, eq. 4)", at_least=0)
    balance_scope: Literal["batch", "sequence"] = key(
        "batch", "the balance loss is one over the global microbatch, or the mean of one over each sample"
    )
    bias_rate: float = key(0.0, "step of the selection bias that balances without a loss; 0: no bias", at_least=0)
    z_loss: float = key(0.001, "weight of the router z-loss (ST-MoE, eq. 5)", at_least=0)
    mtp_depth: int = key(0, "depths of multi-token prediction (DeepSeek-V3, section 2.2); 0: none", at_least=0)
    mtp_weight: float = key(0.3, "weight of the mean of their losses (DeepSeek-V3, eq. 25)", at_least=0)
    tied: bool = key(False, "use the embedding as the head as well")
    document_mask: bool = key(False, "a token sees its own document only; else all that stands before it in its sample")
    rotary_dim: int = key(0, "leading elements of a head that RoPE turns; 0: all", at_least=0)
    rope_base: float = key(10000.0, "base of the rotary frequencies", at_least=1)
    rope_scaling: Literal["none", "linear", "ntk", "llama3", "yarn"] = key("none", "of RoPE to longer texts")
    rope_factor: float = key(1.0, "how many times longer rope_scaling makes the context", at_least=1)
    rope_context: int = key(4096, "context that is scaled, tokens (llama3, yarn)", at_least=1)
    rope_slow_turns: float = key(1.0, "a pair that turns less often in rope_context is scaled in full", at_least=1e-6)
    rope_fast_turns: float = key(32.0, "a pair that turns more often in rope_context is left alone", at_least=0)
    rope_mscale: float = key(1.0, "yarn: cosine and sine grow by 0.1 * this * ln(rope_factor) + 1 ..", at_least=0)
    rope_mscale_all: float = key(0.0, "yarn: .. over the same of this, whose square scales the softmax", at_least=0)
    norm_eps: float = key(1e-5, "added to the mean square in RMSNorm", at_least=0)
    init_std: float = key(0.02, "standard deviation of initial weights", at_least=0)
    preset: Literal[
        "none",
        "llama2_7b",
        "llama2_13b",
        "llama2_70b",
        "llama3_8b",
        "llama3_70b",
        "llama3_405b",
        "qwen25_72b",
        "mixtral_8x7b",
        "mixtral_8x22b",
        "qwen3_30b_a3b",
        "qwen3_235b_a22b",
        "olmoe_1b_7b",
        "deepseek_moe_16b",
        "deepseek_v2_lite",
        "deepseek_v2",
        "deepseek_v3",
    ] = key("none", "a published model: other defaults for the keys of this section (research/presets.py)")

    def problems(self) -> Iterator[Problem]:
        if self.attention == "gqa" and self.heads % self.kv_heads:
            rule = f"must divide model.heads={self.heads}"
            yield Problem("model.kv_heads", self.kv_heads, rule, divisors(self.heads))
        if self.head_dim % 2:
            yield Problem("model.head_dim", self.head_dim, "must be even: RoPE turns pairs", "even numbers")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            rule = f"must be even and not exceed model.head_dim={self.head_dim}"
            yield Problem("model.rotary_dim", self.rotary_dim, rule, f"0, 2, .. {self.head_dim // 2 * 2}")
        yield from self._rope_problems()
        if self.attention == "mla":
            yield from self._mla_problems()
        if 0 < self.experts < self.top_k:
            rule = f"must not exceed model.experts={self.experts}"
            yield Problem("model.top_k", self.top_k, rule, f"1 to {self.experts}")
        elif self.experts:
            yield from self._group_problems()

    def _group_problems(self) -> Iterator[Problem]:
        groups = self.expert_groups
        if self.experts % groups:
            rule = f"must divide model.experts={self.experts}"
            yield Problem("model.expert_groups", groups, rule, divisors(self.experts))
            return
        inside = self.experts // groups
        if self.top_groups > groups:
            rule = f"must not exceed model.expert_groups={groups}"
            yield Problem("model.top_groups", self.top_groups, rule, f"1 to {groups}")
        elif self.top_k > self.top_groups * inside:
            rule = f"exceeds the {self.top_groups * inside} experts of model.top_groups={self.top_groups} groups"
            yield Problem("model.top_k", self.top_k, rule, f"1 to {self.top_groups * inside}")
        if self.group_best > inside:
            rule = f"exceeds the {inside} experts of a group (model.expert_groups={groups})"
            yield Problem("model.group_best", self.group_best, rule, f"1 to {inside}")

    def _mla_problems(self) -> Iterator[Problem]:
        if not 0 < self.rotary_dim < self.head_dim:
            rule = f"must part turned elements from others in model.head_dim={self.head_dim} (model.attention=mla)"
            yield Problem("model.rotary_dim", self.rotary_dim, rule, f"2, 4, .. {(self.head_dim - 1) // 2 * 2}")
        for name, off in (("qk_norm", "none"), ("qkv_bias", False), ("out_bias", False)):
            if (value := getattr(self, name)) != off:
                yield Problem(f"model.{name}", value, "is no part of model.attention=mla", text_of(off))

    def _rope_problems(self) -> Iterator[Problem]:
        if self.rope_scaling == "none" and self.rope_factor != 1:
            yield Problem("model.rope_factor", self.rope_factor, "scales nothing with model.rope_scaling=none", "1")
        if self.rope_scaling in ("llama3", "yarn") and self.rope_slow_turns >= self.rope_fast_turns:
            rule = f"must be less than model.rope_fast_turns={text_of(self.rope_fast_turns)}"
            legal = f"more than 0, less than {text_of(self.rope_fast_turns)}"
            yield Problem("model.rope_slow_turns", self.rope_slow_turns, rule, legal)
        if self.rope_scaling == "yarn" and self.rope_base == 1:
            rule = "makes all frequencies one, so that yarn cannot part them"
            yield Problem("model.rope_base", self.rope_base, rule, "more than 1")
        if self.rope_scaling == "ntk" and self.rotary_width == 2:
            rule = "changes nothing where RoPE turns a single pair"
            yield Problem("model.rope_scaling", "ntk", rule, "another scaling")

    def is_moe(self, layer: int) -> bool:
        """Whether a layer's feed-forward is experts. Depths of multi-token prediction have layers like the last one."""
        return self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.moe_every == 0

    def window_of(self, layer: int) -> int:
        """Tokens that a token of this layer sees, itself included; 0: all before it."""
        return self.window if layer >= self.window_from else 0

    @property
    def rotary_width(self) -> int:
        """Elements of a head that RoPE turns."""
        return self.rotary_dim or self.head_dim

    @property
    def value_width(self) -> int:
        """Elements of one head of values."""
        return self.value_dim if self.attention == "mla" else self.head_dim


@dataclass(frozen=True)
class DpConfig:
    """Data parallelism: ranks that hold the same weights and take different rows of the batch."""

    degree: int = key(-1, "ranks on the dp axis; -1 takes what the world leaves over, 1 where no world is stated")
    zero: Literal[0, 1, 2, 3] = key(
        0, "what is cut over the ranks: 1 masters and moments, 2 gradients as well, 3 parameters as well (ZeRO)"
    )
    replicas: int = key(1, "parts of the dp axis that each hold everything, cut inside (hybrid sharding)", at_least=1)
    keep_gathered: bool = key(False, "keep gathered parameters for backward: more memory, one all-gather less")
    grad_dtype: Literal["float32", "bfloat16"] = key("float32", "of gradient sums; float64 in a float64 run")

    def problems(self) -> Iterator[Problem]:
        if self.degree < 1 and self.degree != -1:
            yield Problem("dp.degree", self.degree, "is not a number of ranks", "-1 or at least 1")
        if self.replicas > 1 and self.zero == 0:
            yield Problem("dp.replicas", self.replicas, "has nothing to replicate with dp.zero=0", "1")
        if self.keep_gathered and self.zero < 3:
            yield Problem("dp.keep_gathered", True, f"has nothing to keep with dp.zero={self.zero}", "false")


@dataclass(frozen=True)
class TpConfig:
    """Tensor parallelism: ranks that hold parts of the heads, of the feed-forward width and of the vocabulary."""

    degree: int = key(1, "ranks on the tp axis; 1 is off", at_least=1)
    sequence: bool = key(True, "sequence parallelism: outside column..row a rank holds its part of the tokens, not all")
    overlap: int = key(1, "pieces in which activations travel, each beside the product of another", at_least=1)
    keep_gathered: bool = key(False, "keep gathered inputs for backward: more memory, one all-gather less")


@dataclass(frozen=True)
class CpConfig:
    """Context parallelism: ranks that hold parts of the tokens of each sample."""

    degree: int = key(1, "ranks on the cp axis; 1 is off", at_least=1)
    method: Literal["ring", "ulysses", "all_gather", "hybrid"] = key(
        "ring",
        "keys and values travel from rank to rank (ring) or all at once (all_gather); heads are exchanged for tokens "
        "(ulysses); that among cp.ulysses neighbours and a ring of the rest (hybrid)",
    )
    balance: Literal["none", "zigzag", "striped"] = key(
        "zigzag",
        "tokens of a rank of the ring: a run of them, two runs that are as far from the middle, or every n-th token",
    )
    ulysses: int = key(1, "neighbours that exchange heads for tokens, of cp.degree (hybrid)", at_least=1)


@dataclass(frozen=True)
class EpConfig:
    """Expert parallelism: ranks that hold parts of the routed experts, the same ranks that dp, cp and tp count."""

    degree: int = key(1, "ranks that share the routed experts; 1 is off", at_least=1)
    tensor: int = key(1, "ranks that share each of them, cut in its hidden width; 1: experts are whole", at_least=1)
    dispatch: Literal["all_to_all", "all_gather"] = key(
        "all_to_all", "tokens go to the ranks of their experts, or to all ranks of a (small) group"
    )
    overlap: int = key(1, "pieces in which tokens travel, each beside the experts' work on another", at_least=1)


@dataclass(frozen=True)
class PpConfig:
    """Pipeline parallelism: ranks that hold stages, consecutive parts of the model."""

    degree: int = key(1, "ranks on the pp axis; 1 is off", at_least=1)
    schedule: str = key(
        "1f1b",
        "order of the microbatches' passes: gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_h2, interleaved_zb, zbv, "
        "v_half, v_min, dualpipe, dualpipe_v, or file:PATH (research/parallel/pp/README.md)",
        path=True,
    )
    stages_per_rank: int = key(0, "stages of a rank; 0: as many as the schedule has, 2 where that is open", at_least=0)
    cut: str = key(
        "even",
        "which layers are whose stage: even (as many in each, or one more), cost (FLOPs of the costliest stage are as "
        "few as they can be, with those of the head), or how many in each, such as 2,3,3,2",
    )


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer and sample length."""

    path: tuple[str, ...] = key(
        ("stdlib",),
        "sources, each one of: stdlib (source text of Python's standard library); a UTF-8 text, .jsonl or .parquet "
        "file, a folder or a glob of them; a .bin of token ids with its .json sidecar; a Megatron .bin/.idx pair",
        path=True,
    )
    weights: tuple[float, ...] = key((), "share of the samples that each source gets; [] goes by size", at_least=0)
    text_field: str = key("text", "JSONL field and Parquet column that hold a document")
    heldout: float = key(0.0, "share of the documents kept from training, for evaluation", at_least=0, at_most=0.9)
    tokenizer: str = key(
        "bytes", "bytes, bpe (byte-level, trained on the text), or the path of a tokenizer.json", path=True
    )
    bpe_vocab: int = key(4096, "entries of the trained BPE", at_least=257)
    sequence: int = key(64, "tokens of one sample", at_least=1)
    cache: str = key(".cache/data", "folder for tokenised text; safe to delete", path=True)

    def problems(self) -> Iterator[Problem]:
        if not self.path:
            yield Problem("data.path", "[]", "names no source", "at least one")
        if self.weights and len(self.weights) != len(self.path):
            rule = f"must hold one weight for each of the {len(self.path)} sources of data.path"
            yield Problem("data.weights", self.weights, rule, f"[] or {len(self.path)} numbers")
        for i, weight in enumerate(self.weights):
            if weight == 0:
                yield Problem(f"data.weights[{i}]", weight, "leaves its source out", "more than 0, or no such source")


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation: every number is global, none depends on the layout."""

    steps: int = key(20, "optimizer steps", at_least=1)
    global_batch: int = key(16, "samples of one step, over all ranks and microbatches", at_least=1)
    microbatches: int = key(1, "global microbatches of one step (gradient accumulation)", at_least=1)
    lr: float = key(1e-3, "peak learning rate", at_least=0)
    schedule: Literal["cosine", "wsd"] = key("cosine", "cosine decay, or warm-up, stable, linear decay (wsd)")
    warmup_steps: int = key(5, "steps of linear warm-up", at_least=0)
    decay_share: float = key(0.2, "share of the steps in which wsd decays", at_least=0, at_most=1)
    min_lr_ratio: float = key(0.1, "final learning rate as a share of the peak", at_least=0, at_most=1)
    weight_decay: float = key(0.1, "AdamW decay, on matrices only", at_least=0)
    beta1: float = key(0.9, "AdamW decay of the first moment", at_least=0, at_most=0.9999999)
    beta2: float = key(0.95, "AdamW decay of the second moment", at_least=0, at_most=0.9999999)
    adam_eps: float = key(1e-8, "AdamW term in the denominator", at_least=1e-20)
    clip: float = key(1.0, "largest global gradient norm; 0 does not clip", at_least=0)
    dtype: Literal["float32", "bfloat16", "float64"] = key(
        "float32", "of weights and activations; bfloat16 keeps float32 masters and gradients"
    )
    kernel: Literal["sdpa", "flash"] = key("sdpa", "of attention: torch's own, or flash-attn (CUDA, bfloat16)")
    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "selective: make norms, their casts, rotations and copies for experts, and gated products again in backward, "
        "from what is kept anyway; full: keep only each layer's input, run all of it again",
    )
    eval_every: int = key(0, "steps between evaluations of the held-out text, and one at the end; 0: none", at_least=0)
    nonfinite: Literal["stop", "skip"] = key("stop", "on a non-finite loss or norm: end the run, or skip the step")
    bucket_mib: float = key(16.0, "size of one gradient bucket, MiB: one collective each", at_least=0)
    deterministic: bool = key(False, "refuse nondeterministic kernels and fill fresh memory with NaN (slower)")
    seed: int = key(0, "of initial values and of the order of samples", at_least=0)

    def problems(self) -> Iterator[Problem]:
        if self.microbatches > self.global_batch:
            rule = f"must not exceed train.global_batch={self.global_batch}"
            yield Problem("train.microbatches", self.microbatches, rule, f"1 to {self.global_batch}")
        if self.kernel == "flash" and self.dtype != "bfloat16":
            yield Problem("train.kernel", self.kernel, f"does not know train.dtype={self.dtype}", "sdpa, or bfloat16")
        if self.kernel == "flash" and self.deterministic:
            rule = "has a backward that is not deterministic, and train.deterministic=true"
            yield Problem("train.kernel", self.kernel, rule, "sdpa, or train.deterministic=false")
        if self.kernel == "flash" and importlib.util.find_spec("flash_attn") is None:
            yield Problem("train.kernel", self.kernel, "needs the package flash-attn", "sdpa, or pip install .[flash]")


@dataclass(frozen=True)
class RecordConfig:
    """Where the row of a run goes and what it says of itself."""

    folder: str = key("results", "rows are written to FOLDER/rows", path=True)
    ablation: str = key("", "name of the ablation that this run belongs to")
    arm: str = key("", "name of the arm in that ablation")
    repeat: int = key(0, "number of this repetition of the same run, for the scatter of measurements", at_least=0)
    warmup_steps: int = key(3, "first steps that timings leave out", at_least=0)
    peak_tflops: float = key(0.0, "peak of one device in the run's dtype, TFLOP/s; 0 leaves MFU out", at_least=0)
    causal_flops: bool = key(True, "count attention under the causal mask only: half the square")
    tensorboard: bool = key(False, "write scalars and hyper-parameters to FOLDER/tensorboard")
    profile: bool = key(False, "write a trace of the last step of rank 0 to FOLDER/traces/<run_id>.json, for Perfetto")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a training, and what it starts from."""

    every: int = key(0, "steps between checkpoints, and one after the last step; 0: none", at_least=0)
    folder: str = key(
        "", "they are written to FOLDER/step-<steps>; '': <record.folder>/checkpoints/<run_id>", path=True
    )
    keep: int = key(2, "newest checkpoints that are kept; 0: all", at_least=0)
    keep_every: int = key(0, "checkpoints of steps that this divides are kept as well; 0: none", at_least=0)
    resume: str = key(
        "",
        "go on from a checkpoint, in any layout: latest (of this run), auto (the same, or start where there is none), "
        "or the folder of a checkpoint or of a run",
        path=True,
    )
    weights: str = key("", "folder of a checkpoint or of a run, whose weights replace the initial ones", path=True)
    weights_names: tuple[str, ...] = key(("*",), "patterns of the parameter names that are taken from it")


@dataclass(frozen=True)
class GenerateConfig:
    """How experiments.generate goes on from prompts."""

    tokens: int = key(64, "tokens that are made for each prompt, at most", at_least=1)
    temperature: float = key(0.0, "logits are divided by it; 0: the likeliest token, always", at_least=0)
    top_p: float = key(
        1.0, "a token is drawn from the fewest whose probabilities add up to this", at_least=1e-9, at_most=1
    )
    seed: int = key(0, "of what is drawn, with the number of the prompt and the position", at_least=0)
    block: int = key(16, "tokens of one block of the key-value cache", at_least=1)
    cache_tokens: int = key(
        0, "tokens that the cache has room for on each rank; other prompts wait; 0: all at once", at_least=0
    )

    def problems(self) -> Iterator[Problem]:
        if 0 < self.cache_tokens < self.block:
            rule = f"is less than a block of generate.block={self.block}"
            yield Problem("generate.cache_tokens", self.cache_tokens, rule, f"0, or at least {self.block}")


@dataclass(frozen=True)
class LaunchConfig:
    """How ranks are started and on what."""

    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: cuda where each rank of a node has one, else cpu")
    threads: int = key(0, "CPU threads of one rank; 0 shares the cores among the ranks of a node", at_least=0)
    timeout_s: float = key(300.0, "a collective that takes longer ends the run, seconds", at_least=1)

    @property
    def backend_timeout_s(self) -> float:
        """When the backend itself gives up: later than the watchdog, which knows who is missing."""
        return self.timeout_s + 5


@dataclass(frozen=True)
class SlurmConfig:
    """What `experiments.ablate FILE --submit` asks a cluster for, for each run. Nothing here changes a result."""

    partition: str = key("", "partition; '': the default of the cluster")
    account: str = key("", "account that pays; '': the user's default")
    qos: str = key("", "quality of service; '': the default")
    minutes: int = key(0, "time limit of a run of an ablation, on this machine too; 0: the partition's, none here", 0)
    nodes: int = key(1, "nodes of a run; its ranks are spread evenly over them", at_least=1)
    cpus: int = key(1, "CPU cores of a rank", at_least=1)
    at_once: int = key(0, "runs of an array that may run at a time; 0: all that find room", at_least=0)
    notice_s: int = key(
        120, "seconds before the limit in which a run with checkpoints saves and is queued again", 1, 65535
    )
    launcher: Literal["srun", "torchrun"] = key("srun", "what starts the ranks")
    options: tuple[str, ...] = key((), "further options of sbatch, such as --constraint=h100")

    def problems(self) -> Iterator[Problem]:
        for option in self.options:
            if not option.startswith("-"):
                yield Problem("slurm.options", option, "is not an option of sbatch", "--name=value, -x")


@dataclass(frozen=True)
class RunConfig:
    """A whole run. The section of an axis that is absent means degree 1."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dp: DpConfig = field(default_factory=DpConfig)
    cp: CpConfig = field(default_factory=CpConfig)
    tp: TpConfig = field(default_factory=TpConfig)
    ep: EpConfig = field(default_factory=EpConfig)
    pp: PpConfig = field(default_factory=PpConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def problems(self) -> Iterator[Problem]:
        """Rules that join keys of two sections; those of an axis are its own."""
        if self.train.kernel == "flash" and self.model.document_mask:
            yield Problem("train.kernel", "flash", "does not know model.document_mask=true", "sdpa, or false")
        if self.model.mtp_depth >= self.data.sequence:
            rule = f"leaves no target in a sample of data.sequence={self.data.sequence} tokens at its last depth"
            yield Problem("model.mtp_depth", self.model.mtp_depth, rule, f"0 to {self.data.sequence - 1}")


Check = Callable[[RunConfig], Iterator[Problem]]
AXIS_SECTIONS = ("pp", "dp", "cp", "tp", "ep")


def degrees(config: RunConfig) -> dict[str, int]:
    """Degree of every axis; an axis without a section counts 1, `ep.tensor` stands under `etp`."""
    sections = {axis: getattr(config, axis, None) for axis in AXIS_SECTIONS}
    return {a: getattr(s, "degree", 1) for a, s in sections.items()} | {"etp": getattr(sections["ep"], "tensor", 1)}


ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}  # by train.dtype


def step_tokens(config: RunConfig) -> int:
    """Tokens of a step on the first rank, of which no other has more."""
    return sum(microbatch_tokens(config))


def microbatch_tokens(config: RunConfig) -> list[int]:
    """Those of each microbatch: dp cuts it by rows, the first ranks taking one more where they do not divide, and cp
    cuts each sample."""
    train, sizes = config.train, degrees(config)
    rows = [(train.global_batch + m) // train.microbatches for m in range(train.microbatches)]
    return [-(-n // max(sizes["dp"], 1)) * config.data.sequence // sizes["cp"] for n in rows]


def with_world(config: RunConfig, world: int | None) -> tuple[RunConfig, list[Problem]]:
    """Fill in `dp.degree: -1` and hold the degrees to the world (None: as many ranks as they need)."""
    sizes = degrees(config)
    others = math.prod(sizes[a] for a in ("pp", "cp", "tp"))
    if sizes["dp"] == -1:
        if world is not None and world % others:
            rule = f"(pp*cp*tp) must divide the world of {world} ranks"
            return replace(config, {"dp.degree": 1}), [Problem("degrees", others, rule, divisors(world))]
        config = replace(config, {"dp.degree": 1 if world is None else world // others})
    elif world is not None and others * sizes["dp"] != world:
        legal = f"{world // others}, or -1" if world % others == 0 else "-1, with other degrees"
        rule = f"times pp*cp*tp={others} must equal the world of {world} ranks"
        return config, [Problem("dp.degree", sizes["dp"], rule, legal)]
    return config, []


def replace(config: RunConfig, changes: Mapping[str, Value]) -> RunConfig:
    """A copy with some `section.key`s changed; neither types nor rules are checked."""
    for name, value in changes.items():
        section, _, leaf = name.partition(".")
        part = dataclasses.replace(getattr(config, section), **{leaf: value})
        config = dataclasses.replace(config, **{section: part})
    return config
