"""A value of the wrong type, range or form is refused, from the command line and from a file alike."""

import pytest

from research import settings
from research.data import corpus

INTEGER = "is not an integer; legal: an integer, at least 1"
NUMBER = "is not a number; legal: a number, at least 0"
PLAIN = "write a plain decimal number; legal: a number, at least 0"

# key, value as it is written, what is told after `key=value`
WRONG = [
    # wrong types
    ("model.dim", "abc", INTEGER),
    ("model.dim", "64.0", INTEGER),
    ("model.dim", "true", INTEGER),
    ("model.dim", "[1]", INTEGER),
    ("train.steps", "1e3", INTEGER),
    ("train.steps", "2001-01-01", INTEGER),
    ("train.lr", "abc", NUMBER),
    ("train.lr", "true", NUMBER),
    ("train.lr", "nan", NUMBER),
    ("train.lr", "inf", NUMBER),
    ("model.tied", "2", "is not a truth value; legal: true, false"),
    ("model.tied", "1", "is not a truth value; legal: true, false"),
    ("model.tied", "maybe", "is not a truth value; legal: true, false"),
    ("record.arm", "3", "is not text; legal: text"),
    ("record.arm", "1e3", "is not text; legal: text"),
    ("record.arm", "true", "is not text; legal: text"),
    ("train.dtype", "float16", "is not one of its choices; legal: float32, bfloat16, float64"),
    ("train.dtype", "32", "is not one of its choices; legal: float32, bfloat16, float64"),
    # text in the form of a number
    ("train.steps", '"5"', INTEGER),
    ("train.lr", '"1e-4"', NUMBER),
    # null
    ("model.dim", "null", INTEGER),
    ("train.lr", "null", NUMBER),
    ("model.tied", "null", "is not a truth value; legal: true, false"),
    ("record.arm", "null", "is not text; legal: text"),
    ("launch.device", "null", "is not one of its choices; legal: auto, cpu, cuda"),
    # out of range
    ("model.dim", "0", "is out of range; legal: an integer, at least 1"),
    ("model.dim", "-3", "is out of range; legal: an integer, at least 1"),
    ("train.lr", "-1e-4", "is out of range; legal: a number, at least 0"),
    ("train.beta1", "1", "is out of range; legal: 0 to 0.9999999"),
    ("train.decay_share", "1.5", "is out of range; legal: 0 to 1"),
    ("launch.timeout_s", "0", "is out of range; legal: a number, at least 1"),
    ("dp.degree", "0", "is not a number of ranks; legal: -1 or at least 1"),
    ("dp.degree", "-2", "is not a number of ranks; legal: -1 or at least 1"),
    # not finite
    ("train.lr", ".nan", "must be finite; legal: a number, at least 0"),
    ("train.lr", ".inf", "must be finite; legal: a number, at least 0"),
    ("train.lr", "-.INF", "must be finite; legal: a number, at least 0"),
    ("train.lr", "1e400", "must be finite; legal: a number, at least 0"),
    ("train.lr", "9" * 400, "must be finite; legal: a number, at least 0"),
    # numbers that YAML 1.1 reads in its own way
    ("train.steps", "12:30", "would be read as 750: write a plain decimal number; legal: an integer, at least 1"),
    ("train.steps", "010", "would be read as 8: write a plain decimal number; legal: an integer, at least 1"),
    ("train.lr", "12:30", f"would be read as 750: {PLAIN}"),
    ("train.lr", "1:30.5", f"would be read as 90.5: {PLAIN}"),
    ("train.lr", "0x10", f"would be read as 16: {PLAIN}"),
    ("train.lr", "0b11", f"would be read as 3: {PLAIN}"),
    # too near to zero for a float
    ("train.lr", "1e-400", "would be read as 0.0: it is too near to zero; legal: a number, at least 0"),
    ("train.lr", "0.30E-400", "would be read as 0.0: it is too near to zero; legal: a number, at least 0"),
    ("train.lr", "-1e-400", "would be read as -0.0: it is too near to zero; legal: a number, at least 0"),
    ("train.lr", f"0.{'0' * 400}1", "would be read as 0.0: it is too near to zero; legal: a number, at least 0"),
]


@pytest.mark.parametrize("route", ["words", "file"])
@pytest.mark.parametrize(("key", "written", "told"), WRONG)
def test_a_wrong_value_is_told_as_it_was_written(refused, key: str, written: str, told: str, route: str) -> None:
    section, leaf = key.split(".")
    if route == "words":
        assert refused(f"{key}={written}") == [f"{key}={written} {told}"]
    else:
        assert refused(text=f"{section}:\n  {leaf}: {written}\n") == [f"{key}={written} {told}"]


def test_nothing_after_the_equals_sign_is_null(refused) -> None:
    assert refused("model.dim=", text="train: {lr: }") == [f"train.lr=null {NUMBER}", f"model.dim=null {INTEGER}"]


@pytest.mark.parametrize("text", ["a #b", "a\nb", "&a b", "!!str a"])
def test_text_that_yaml_would_change_is_refused(refused, text: str) -> None:
    (line,) = refused(f"record.arm={text}")
    assert line.startswith(f"record.arm={text} would be read as ") and line.endswith("put it in quotes; legal: text")


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "1.e-4", "1.0e-04", "0.0001", ".0001", "+1e-4"])
@pytest.mark.parametrize("key", ["train.lr", "train.clip", "model.balance", "model.norm_eps", "train.adam_eps"])
def test_small_numbers_are_numbers_everywhere(tmp_path, key: str, written: str) -> None:
    (tmp_path / "some.yaml").write_text(f"{key.replace('.', ': {')}: {written}}}")
    from_file = settings.to_mapping(settings.load(tmp_path / "some.yaml"))
    from_word = settings.to_mapping(settings.load(None, [f"{key}={written}"]))
    section, leaf = key.split(".")
    assert from_file == from_word
    assert from_word[section][leaf] == 1e-4 and type(from_word[section][leaf]) is float


@pytest.mark.parametrize("written", ["0", "0.0", "-0.", "0.0e5", "0e-10"])
def test_zero_is_no_number_too_near_to_it(written: str) -> None:
    assert settings.load(None, [f"train.lr={written}"]).train.lr == 0


def test_a_number_of_a_list_that_is_too_near_to_zero(refused) -> None:
    (line,) = refused("data.path=[stdlib,stdlib]", "data.weights=[1,1e-400]")
    assert line.startswith("data.weights[1]=1e-400 would be read as 0.0: it is too near to zero; legal: ")


@pytest.mark.parametrize(("written", "value"), [("3e5", 3e5), ("3", 3.0), ("1_000.5", 1000.5), ("5.", 5.0)])
def test_large_and_whole_numbers_are_floats_where_floats_belong(written: str, value: float) -> None:
    lr = settings.load(None, [f"train.lr={written}"]).train.lr
    assert lr == value and type(lr) is float


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model.kv_heads=3"], "model.kv_heads=3 must divide model.heads=8; legal: 1, 2, 4, 8"),
        (["model.head_dim=9"], "model.head_dim=9 must be even: RoPE turns pairs; legal: even numbers"),
        (
            ["model.rotary_dim=10"],
            "model.rotary_dim=10 must be even and not exceed model.head_dim=8; legal: 0, 2, .. 8",
        ),
        (["model.rope_factor=2"], "model.rope_factor=2 scales nothing with model.rope_scaling=none; legal: 1"),
        (
            ["model.rope_scaling=llama3", "model.rope_slow_turns=4", "model.rope_fast_turns=4"],
            "model.rope_slow_turns=4 must be less than model.rope_fast_turns=4; legal: more than 0, less than 4",
        ),
        (
            ["model.rope_scaling=yarn", "model.rope_base=1"],
            "model.rope_base=1 makes all frequencies one, so that yarn cannot part them; legal: more than 1",
        ),
        (
            ["model.rope_scaling=ntk", "model.rotary_dim=2"],
            "model.rope_scaling=ntk changes nothing where RoPE turns a single pair; legal: another scaling",
        ),
        (
            ["model.attention=mla"],
            "model.rotary_dim=0 must part turned elements from others in model.head_dim=8 (model.attention=mla); "
            "legal: 2, 4, .. 6",
        ),
        (
            ["model.attention=mla", "model.rotary_dim=2", "model.qk_norm=all"],
            "model.qk_norm=all is no part of model.attention=mla; legal: none",
        ),
        (
            ["model.attention=mla", "model.rotary_dim=2", "model.out_bias=true"],
            "model.out_bias=true is no part of model.attention=mla; legal: false",
        ),
        (["model.expert_groups=3"], "model.expert_groups=3 must divide model.experts=8; legal: 1, 2, 4, 8"),
        (["model.top_groups=2"], "model.top_groups=2 must not exceed model.expert_groups=1; legal: 1 to 1"),
        (
            ["model.expert_groups=8", "model.top_groups=1"],
            "model.top_k=2 exceeds the 1 experts of model.top_groups=1 groups; legal: 1 to 1",
        ),
        (
            ["model.expert_groups=4", "model.group_best=3"],
            "model.group_best=3 exceeds the 2 experts of a group (model.expert_groups=4); legal: 1 to 2",
        ),
        (["model.top_k=9"], "model.top_k=9 must not exceed model.experts=8; legal: 1 to 8"),
        (["train.microbatches=17"], "train.microbatches=17 must not exceed train.global_batch=16; legal: 1 to 16"),
        (["model.vocab=245"], "model.vocab=245 must hold the 246 ids of data.tokenizer=bytes; legal: at least 246"),
        (
            ["data.path=/nowhere/text"],
            f"data.path=/nowhere/text does not exist; legal: {corpus.LEGAL}",
        ),
        (
            ["record.folder=/dev/null/results"],
            "record.folder=/dev/null/results cannot be written to; legal: a folder, made where it is missing",
        ),
        (
            ["record.arm=tp/2"],
            "record.arm=tp/2 is part of a file name; legal: up to 60 letters, digits, spaces and . + , = ( ) _ -",
        ),
        (
            ["dp.degree=9", "train.microbatches=2"],
            "dp.degree=9 leaves ranks without a sample: the smallest microbatch has 8 (train.global_batch=16 over "
            "train.microbatches=2); legal: 1 to 8",
        ),
    ],
)
def test_an_impossible_combination_names_both_keys(refused, words: list[str], told: str) -> None:
    assert refused(*words) == [told]


def test_latent_attention_has_no_kv_heads() -> None:
    words = ["model.attention=mla", "model.rotary_dim=4", "model.heads=5"]
    assert settings.load(None, words).model.kv_heads == 2


def test_no_experts_need_no_top_k() -> None:
    assert settings.load(None, ["model.experts=0", "model.top_k=9"]).model.experts == 0


@pytest.mark.timeout(5)
def test_legal_values_of_a_huge_number_take_no_time(refused) -> None:
    (line,) = refused("model.heads=1000000000000001", "model.kv_heads=2")
    assert line.endswith("legal: the divisors of 1000000000000001")
