"""Record of a run of the suite: every test's outcome and comparisons, as JSON."""

import dataclasses

from tests.support.gpu.machine import describe_machine, write_json


class Summary:
    """A pytest plug-in that rewrites its file after every test: a run may be cut off by its limit."""

    def __init__(self, file):
        self.file = file
        self.tests = {}

    def pytest_runtest_logreport(self, report):
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] += report.duration
        if report.outcome != "passed":
            test["outcome"] = report.outcome
            test["reason"] = _last_line(report)
        if report.when != "teardown":
            return
        for name, tally in report.user_properties:
            test[name] = dataclasses.asdict(tally)
        self._write()

    def _write(self):
        write_json(self.file, record_of(self.tests))


def record_of(tests):
    tallies = [test["tally"] for test in tests.values() if "tally" in test]
    outcomes = [test["outcome"] for test in tests.values()]
    return {
        "what": "the GPU suite (tests/gpu); tests of negative controls are to find mismatches",
        "machine": describe_machine(),
        "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "compared_cases": sum(tally["cases"] for tally in tallies),
        "compared_values": sum(tally["values"] for tally in tallies),
        "tests": tests,
    }


def _last_line(report):
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)[-500:]
