"""The harness keeps records straight: what is written is what was measured, asked and promised."""

from __future__ import annotations

import json
import random
import re
import statistics
from pathlib import Path

import pytest

from experiments.harness import catalogue, environment, plots, record, report, runner, stats
from experiments.harness.catalogue import INDEX_CLOSE, INDEX_OPEN, discover
from experiments.harness.document import Json, ResultError
from experiments.harness.environment import Machine
from experiments.harness.result import Result, Verdict, parse, read

CRITERION = "the median is below 5 ms"

RUN = f'''"""Measures nothing."""
from experiments.harness.record import Run
from experiments.harness.result import Verdict
ID = "EXP-901"
QUESTION: str = "Is it fast?"
CRITERION = "{CRITERION}"
PARAMETERS = {{"n": 2}}
def run(parameters):
    raise NotImplementedError
'''


def a_result(**changes: object) -> Result:
    result = Result(
        id="EXP-901",
        question="Is it fast?",
        commit="0123abc",
        dirty=False,
        machine=Machine("a chip", 2, 2**34, "Linux x86_64"),
        versions={"python": "3.11.7"},
        model="semantic-tiny",
        parameters={"n": 3, "bits": None},
        seed=7,
        started_at="2026-11-20T12:00:00+00:00",
        samples=({"n": 1, "ms": 2.5}, {"n": 2, "ms": 4.125}),
        summary={"p50_ms": 3.3125, "by_n": {"1": 2.5}, "rows": [{"n": 1, "ms": 2.5}]},
        verdict=Verdict(CRITERION, 5.0, 3.3125, passed=True),
    )
    for name, value in changes.items():
        object.__setattr__(result, name, value)
    return result


def a_document() -> dict[str, Json]:
    document = json.loads(a_result().to_json())
    assert isinstance(document, dict)
    return document


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one experiment that has run."""
    folder = tmp_path / "experiments" / "exp_901_speed"
    folder.mkdir(parents=True)
    (folder / "run.py").write_text(RUN, encoding="utf-8")
    region = "<!-- result:exp_901_speed summary.p50_ms .1f -->3.3<!-- /result -->"
    (folder / "README.md").write_text(f"# Fast\n\nIt took {region} ms.\n", encoding="utf-8")
    a_result().write(folder / "result.json")
    readme = tmp_path / "experiments" / "README.md"
    readme.write_text(f"# All\n\n{INDEX_OPEN}\n{INDEX_CLOSE}\nend\n", encoding="utf-8")
    runner.refresh_index(tmp_path)
    return tmp_path


# --- results ----------------------------------------------------------------------------------


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    a_result().write(path)
    assert read(path) == a_result()


def test_the_same_result_is_the_same_text_with_one_newline_at_its_end() -> None:
    text = a_result(parameters={"b": 1, "a": 2}).to_json()
    assert text == a_result(parameters={"a": 2, "b": 1}).to_json()
    assert text.endswith("}\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": " "}, "question: empty"),
        ({"commit": "main"}, "commit: expected a hash"),
        ({"seed": True}, "seed: expected an integer, got True"),
        ({"dirty": 0}, "dirty: expected true or false, got 0"),
        ({"started_at": "yesterday"}, "started_at: expected an ISO 8601 time"),
        ({"started_at": "2026-11-20T12:00:00"}, "does not say its time zone"),
        ({"samples": ()}, "samples: expected a list with at least one entry"),
        ({"samples": ({"ms": [1]},)}, r"samples\[0\].ms: expected a finite number"),
        ({"summary": {}}, "summary: empty"),
        ({"summary": {"a": [float("nan")]}}, r"summary.a\[0\]: expected a finite number"),
        ({"versions": {"mlx": "1"}}, "versions.python: missing"),
        ({"machine": {"chip": "x"}}, "machine.cores: missing"),
        ({"schema": "semantic.result/0"}, "schema: expected 'semantic.result/1'"),
        ({"verdict": Verdict(CRITERION, 5, float("inf"), passed=True)}, "verdict.observed"),
        ({"parameters": {"model": object()}}, "a field is not JSON"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ResultError, match=message):
        a_result(**changes).validate()


def test_an_invalid_result_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ResultError):
        a_result(samples=()).write(tmp_path / "result.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", sorted(a_document()))
def test_no_field_may_be_missing(key: str) -> None:
    document = a_document()
    del document[key]
    with pytest.raises(ResultError, match=f"{key}: missing"):
        parse(document)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ResultError, match="sumary: unknown field"):
        parse({**a_document(), "sumary": {}})


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{", encoding="utf-8")
    with pytest.raises(ResultError, match=r"^result\.json: "):
        read(tmp_path / "result.json")


@pytest.mark.process
def test_a_run_records_where_it_ran_and_what_it_found() -> None:
    started = record.Run.start("EXP-901", "Is it fast?", model="none", parameters={}, seed=0)
    verdict = Verdict(CRITERION, 5, 9, passed=False)
    result = started.finish([{"ms": 9}], {"p50_ms": 9}, verdict)
    assert result.verdict == verdict
    assert result.machine == environment.machine()
    assert result.versions["python"].startswith("3.")


# --- environment ------------------------------------------------------------------------------


def test_the_machine_has_cores_memory_and_a_chip() -> None:
    machine = environment.machine()
    assert machine.cores >= 1
    assert machine.memory_bytes > 2**20
    assert machine.chip


@pytest.mark.process
def test_code_without_a_repository_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.COMMIT_VARIABLE, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.commit(tmp_path) == environment.Commit("unknown", dirty=True)


def test_a_commit_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "0123abc-dirty")
    assert environment.commit(tmp_path) == environment.Commit("0123abc", dirty=True)


# --- statistics -------------------------------------------------------------------------------


def test_percentiles_interpolate_between_ranks() -> None:
    assert stats.percentile([4, 1, 3, 2], 50) == 2.5
    assert stats.percentile([10, 20], 95) == pytest.approx(19.5)
    assert stats.percentile([7], 99) == 7


def test_percentiles_agree_with_the_standard_library() -> None:
    values = [random.Random(3).gauss(10, 2) for _ in range(57)]
    expected = statistics.quantiles(values, n=100, method="inclusive")
    assert [stats.percentile(values, p) for p in range(1, 100)] == pytest.approx(expected)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1], -1), ([1], 101)])
def test_a_percentile_of_nothing_is_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        stats.percentile(values, percent)


def test_a_summary_prefixes_its_keys() -> None:
    summary = stats.summarise([1.0, 3.0], "ms_")
    assert summary["ms_mean"] == 2.0
    assert summary["ms_std"] == pytest.approx(2**0.5)
    assert stats.summarise([5.0])["std"] == 0.0


# --- reports ----------------------------------------------------------------------------------


def test_a_number_comes_from_its_result(root: Path) -> None:
    text = "<!-- result:exp_901_speed summary.p50_ms .2f -->?<!-- /result --> ms"
    assert "-->3.31<!--" in report.render(text, root)


def test_a_result_may_be_named_by_its_path(root: Path) -> None:
    name = "experiments/exp_901_speed/result.json"
    assert report.lookup(name, "samples.1.ms", root) == 4.125


def test_an_edited_number_is_caught_with_its_line(root: Path) -> None:
    path = root / "experiments" / "exp_901_speed" / "README.md"
    assert report.differences(path, root) == []
    path.write_text(path.read_text(encoding="utf-8").replace(">3.3<", ">1.3<"), encoding="utf-8")
    (line,) = report.differences(path, root)
    assert line.startswith("experiments/exp_901_speed/README.md:3: has")


def test_filling_twice_changes_nothing(root: Path) -> None:
    path = root / "a.md"
    path.write_text(
        "<!-- result:exp_901_speed summary.rows -->\nold\n<!-- /result -->", encoding="utf-8"
    )
    assert report.update(path, root)
    assert not report.update(path, root)
    assert "| n | ms |" in path.read_text(encoding="utf-8").replace("| ms | n |", "| n | ms |")


def test_text_without_marks_stays_as_it_is(root: Path) -> None:
    assert report.render("no marks\n", root) == "no marks\n"


@pytest.mark.parametrize("quote", ["`{}`", "```markdown\n{}\n```"])
def test_a_region_shown_as_code_is_left_alone(root: Path, quote: str) -> None:
    text = quote.format("<!-- result:nothing at.all -->1<!-- /result -->")
    assert report.render(text, root) == text


@pytest.mark.parametrize(
    "text",
    [
        "<!-- result:exp_901_speed summary.p50_ms -->3.3",
        "3.3<!-- /result -->",
        "<!-- result:exp_901_speed -->3.3<!-- /result -->",
        "<!-- result:exp_901_speed id --><!-- result:exp_901_speed id -->x<!-- /result -->",
    ],
)
def test_a_broken_region_is_an_error(root: Path, text: str) -> None:
    with pytest.raises(ResultError, match="mark without its partner"):
        report.render(text, root)


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ("exp_999 id", "no such result"),
        ("exp_901_speed summary.p51_ms", "nothing at 'p51_ms'"),
        ("exp_901_speed samples.9.ms", "nothing at '9'"),
        ("exp_901_speed question .1f", "Unknown format code"),
    ],
)
def test_a_region_without_a_value_is_an_error(root: Path, region: str, message: str) -> None:
    with pytest.raises(ResultError, match=message):
        report.render(f"<!-- result:{region} -->x<!-- /result -->", root)


@pytest.mark.parametrize(
    ("value", "spec", "shown"),
    [
        (True, "", "yes"),
        (None, ".1f", "none"),
        (1234567, ",d", "1,234,567"),
        (0.251, ".0%", "25%"),
        ([1, 2], "", "1, 2"),
        ({"a": 1}, "", "\n|  |  |\n| --- | --- |\n| a | 1 |\n"),
        ([{"a": 1, "b": 0.25}], ".1f", "\n| a | b |\n| --- | --- |\n| 1 | 0.2 |\n"),
    ],
)
def test_values_read_well(value: Json, spec: str, shown: str) -> None:
    assert report.show(value, spec) == shown


def test_the_command_fails_on_a_stale_number(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "experiments" / "exp_901_speed" / "README.md"
    monkeypatch.chdir(root)
    name = "experiments/exp_901_speed/result.json"
    path.write_text(f"<!-- result:{name} seed -->8<!-- /result -->", encoding="utf-8")
    assert report.main([str(path), "--check"]) == 1
    assert "no such result" in capsys.readouterr().err


# --- catalogue and runner ---------------------------------------------------------------------


def test_an_experiment_is_found_without_running_it(root: Path) -> None:
    (experiment,) = discover(root)
    assert (experiment.id, experiment.verdict) == ("EXP-901", "passed")
    assert experiment.module == "experiments.exp_901_speed.run"
    assert runner.check(root) == []


def test_two_experiments_may_not_share_an_id(root: Path) -> None:
    other = root / "experiments" / "exp_902_copy"
    other.mkdir()
    (other / "run.py").write_text(RUN, encoding="utf-8")
    with pytest.raises(ResultError, match="the same id EXP-901"):
        discover(root)


@pytest.mark.parametrize("name", ["ID", "QUESTION", "CRITERION", "def run"])
def test_an_incomplete_experiment_is_named(root: Path, name: str) -> None:
    path = root / "experiments" / "exp_901_speed" / "run.py"
    path.write_text(RUN.replace(name, name + "_OLD"), encoding="utf-8")
    with pytest.raises(ResultError, match=r"exp_901_speed/run\.py"):
        discover(root)


def test_a_criterion_moved_after_the_run_is_caught(root: Path) -> None:
    path = root / "experiments" / "exp_901_speed" / "run.py"
    path.write_text(RUN.replace("5 ms", "50 ms"), encoding="utf-8")
    (line,) = runner.check(root)
    assert line.startswith("exp_901_speed/result.json: criterion is")


def test_a_stale_index_is_caught(root: Path) -> None:
    folder = root / "experiments" / "exp_901_speed"
    a_result(verdict=Verdict(CRITERION, 5.0, 9.0, passed=False)).write(folder / "result.json")
    assert runner.check(root) == ["experiments/README.md: the index is out of date"]
    runner.refresh_index(root)
    assert runner.check(root) == []
    assert "| failed |" in (root / "experiments" / "README.md").read_text(encoding="utf-8")


def test_an_experiment_needs_a_report(root: Path) -> None:
    (root / "experiments" / "exp_901_speed" / "README.md").unlink()
    assert runner.check(root) == ["exp_901_speed: its report README.md is missing"]


def test_an_index_needs_its_marks() -> None:
    with pytest.raises(ResultError, match=re.escape(INDEX_OPEN)):
        catalogue.with_index("# nothing", [])


def test_a_failed_criterion_is_kept_like_a_passed_one(root: Path) -> None:
    (experiment,) = discover(root)
    failed = a_result(verdict=Verdict(CRITERION, 5.0, 9.0, passed=False))
    runner.perform(experiment, runner.Program(lambda _: failed), {}, "result.json")
    assert discover(root)[0].verdict == "failed"


def test_a_run_gets_its_parameters_with_the_changes(root: Path) -> None:
    (experiment,) = discover(root)
    seen: list[runner.Parameters] = []

    def run(parameters: runner.Parameters) -> Result:
        seen.append(parameters)
        return a_result()

    program = runner.Program(run, {"n": 2, "m": 3})
    runner.perform(experiment, program, {"n": 9}, "result-b.json")
    assert seen == [{"n": 9, "m": 3}]
    assert [path.name for path in experiment.results] == ["result.json", "result-b.json"]


def test_an_unknown_parameter_is_refused(root: Path) -> None:
    (experiment,) = discover(root)
    with pytest.raises(ResultError, match="no parameter 'k'"):
        runner.perform(experiment, runner.Program(lambda _: a_result()), {"k": 1}, "result.json")


def test_the_answer_to_another_question_is_refused(root: Path) -> None:
    (experiment,) = discover(root)
    program = runner.Program(lambda _: a_result(question="Is it slow?"))
    with pytest.raises(ResultError, match="question is 'Is it slow"):
        runner.perform(experiment, program, {}, "result.json")


def test_experiments_are_chosen_by_id_or_folder(root: Path) -> None:
    found = discover(root)
    assert runner.select(found, []) == found
    assert runner.select(found, ["EXP-901"]) == runner.select(found, ["exp_901_speed"])
    with pytest.raises(ResultError, match="no experiment 'EXP-1'"):
        runner.select(found, ["EXP-1"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("n=3", ("n", 3)), ("x=1.5", ("x", 1.5)), ("on=true", ("on", True)), ("m=a=b", ("m", "a=b"))],
)
def test_a_setting_on_the_command_line_keeps_its_type(text: str, expected: object) -> None:
    assert runner.setting(text) == expected


def test_every_experiment_here_is_consistent() -> None:
    assert runner.check() == []


# --- plots: the first one on a machine starts a process that lists its fonts -------------------


@pytest.mark.process
def test_a_plot_is_the_same_bytes_each_time(root: Path) -> None:
    path = root / "experiments" / "exp_901_speed" / "result.json"
    plot = plots.Plot("time.svg", "Time", x="n", y="ms", show_threshold=True)
    (drawn,) = plots.draw(path, [plot])
    first = drawn.read_bytes()
    plots.draw(path, [plot])
    assert drawn.read_bytes() == first
    assert b"threshold" in first
    assert b"<dc:date>" not in first


@pytest.mark.process
@pytest.mark.parametrize(("x", "message"), [("k", "no sample has both"), ("word", "needs numbers")])
def test_a_plot_without_numbers_is_refused(root: Path, x: str, message: str) -> None:
    path = root / "experiments" / "exp_901_speed" / "result.json"
    a_result(samples=({"word": "a", "ms": 1.0},)).write(path)
    with pytest.raises(ResultError, match=message):
        plots.draw(path, [plots.Plot("time.svg", "Time", x=x, y="ms")])


def test_dots_are_thinned_by_rank_and_keep_the_extremes() -> None:
    values = [float(n) for n in random.Random(3).sample(range(1000), 1000)]
    dots = plots.spread(values, 50)
    assert (len(dots), dots[0], dots[-1]) == (50, 0.0, 999.0)
    assert abs(statistics.median(dots) - statistics.median(values)) < 12
    assert plots.spread([3.0, 1.0], 50) == [1.0, 3.0]
