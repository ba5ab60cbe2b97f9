"""What a proof found: nothing, or the planted fault."""


def assert_equal(findings) -> None:
    failed = [f for f in findings if not f.passed]
    assert not failed, failed[:5]


def fails(findings, what: str) -> bool:
    return any(f.what == what and not f.passed for f in findings)
