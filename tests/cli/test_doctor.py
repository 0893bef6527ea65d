from tests.cli.running import run, run_json


def test_doctor_reports_and_lists_problems(tmp_path, monkeypatch):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path))
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    monkeypatch.setenv("JKVQ_FOO", "a[b][/c]")  # as it is, in a table too
    found = run_json("doctor")
    names = [each["name"] for each in found["findings"]]
    assert {"jkvq", "jax", "cores", "cache", "GPU kernels", "dtype"} <= set(names)
    assert found["problems"] == sum(each["advice"] is not None for each in found["findings"]) >= 1
    printed = run("doctor")
    assert "a[b][/c]" in printed
    assert "! environment, JAX_DISABLE_JIT: nothing is compiled then: unset it" in printed
