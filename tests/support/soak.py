"""Kills processes of whole runs at random moments; each run must end as if nothing had happened.

Run by hand (`make soak`, about an hour). Every kill is drawn from (seed, number): how the run is laid
out, who is killed, in which phase and how far into it. A run that does not end by itself is started
again as the documentation says, with --load. Then its hash must be that of an undisturbed run, and
nothing may be left behind. Each result is written down at once; a second call goes on after the last.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from onpolicy.outputs.directory import versions
from tests.support.footprint import Footprint
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import ROLLOUTS, TWO_RANKS, run_hash, start_train, write_prompts

PHASES = {"_start": "start", "roll_out": "rollout", "train": "train", "push_weights": "push",
          "save_if_due": "save"}  # fmt: skip
VICTIMS = ("trainer", "http", "scheduler", "detokenizer", "guard")
MARKS = f"""
import os
from onpolicy.run.run import Run
def mark(name, phase):
    verb = getattr(Run, name)
    def marked(self, *args):
        text = f"{{os.getpid()}} {{phase}} {{self.rollouts_done}}"
        with open(os.environ["SOAK_MARKS"], "a") as marks:
            marks.write(text + "\\n")
        return verb(self, *args)
    setattr(Run, name, marked)
for name, phase in {PHASES!r}.items():
    mark(name, phase)
"""
MAX_STARTS = 4
PATIENCE = 5.0


class Soak:
    """One record and the runs that it is about."""

    def __init__(self, file: Path, seed: int, work: Path):
        self.file, self.seed, self.work = file, seed, work
        self.checkpoint = make_checkpoint(work / "checkpoint")
        self.data = write_prompts(work / "prompts.jsonl")
        self.record = {"seed": seed, "undisturbed": {}, "kills": []}
        if file.exists() and json.loads(file.read_text())["seed"] == seed:
            self.record = json.loads(file.read_text())
        self.record["versions"] = {**versions(), "processor": processor()}
        self.seconds: dict[tuple[int, str], float] = {}

    def write(self):
        self.file.write_text(json.dumps(self.record, indent=1) + "\n")

    def run(self, number: int):
        """The kill of this number, with all that follows from it."""
        draw = random.Random(f"{self.seed}/{number}")
        setting = {
            "ranks": draw.choice([1, 1, 2]),
            "engines": draw.choice([1, 2]),
            "weight_sync": draw.choice(["tensor", "distributed", "disk"]),
        }
        expected = self.undisturbed(setting["ranks"])
        phase = draw.choice(list(PHASES.values()))
        plan = {
            "victim": draw.choice(VICTIMS),
            "engine": draw.randrange(setting["engines"]),
            "phase": phase,
            "rollouts_done": 0 if phase == "start" else draw.randrange(ROLLOUTS),
            "after": round(draw.random() * self.seconds[setting["ranks"], phase], 3),
        }
        started = time.monotonic()
        outcome = self.strike(setting, plan)
        outcome["seconds"] = round(time.monotonic() - started)
        outcome["hash_is_equal"] = outcome.pop("hash") == expected
        self.record["kills"].append({"number": number, **setting, **plan, **outcome})
        self.write()

    def undisturbed(self, ranks: int) -> str:
        """The hash of a run of so many ranks; how long its phases take goes into `seconds`."""
        if (ranks, "push") not in self.seconds:
            process, marks = self.start(self.fresh_directory(), {"ranks": ranks, "engines": 1})
            self.seconds |= {(ranks, phase): 0.1 for phase in PHASES.values()}
            current, since = None, 0.0
            while process.poll() is None:
                if (mark := last_mark(marks)) != current:
                    if current:
                        self.seconds[ranks, current[1]] = time.monotonic() - since
                    current, since = mark, time.monotonic()
                time.sleep(0.01)
            output = process.stdout.read()
            assert process.returncode == 0, output[-3000:]
            self.record["undisturbed"][str(ranks)] = run_hash(output)
            self.write()
        return self.record["undisturbed"][str(ranks)]

    def strike(self, setting, plan):
        """Start, kill, and start again until the run ends well."""
        directory = self.fresh_directory()
        process, marks = self.start(directory, setting)
        footprint = Footprint(process.pid, directory / "t")
        struck = kill_when_due(process, marks, plan)
        footprints, exit_codes, output = [footprint], [], ""
        while True:
            output += process.communicate(timeout=900)[0]
            exit_codes.append(process.returncode)
            if process.returncode == 0 or len(exit_codes) == MAX_STARTS:
                break
            process, _ = self.start(directory, setting)
            footprints.append(Footprint(process.pid, directory / "t"))
        (directory / "output").write_text(output)
        return {
            "struck": struck,
            "exit_codes": exit_codes,
            "engine_restarts": len(re.findall(r"starting http\S+ again", output)),
            "hash": run_hash(output) if process.returncode == 0 else None,
            "left_behind": sorted({name for each in footprints for name in each.left(PATIENCE)}),
        }

    def start(self, directory: Path, setting):
        marks = directory / "marks"
        marks.touch()
        (directory / "t").mkdir(exist_ok=True)
        save = str(directory / "save")
        process = start_train(
            self.checkpoint, self.data, directory,
            "--rollout-num-engines", str(setting["engines"]), "--cpu-threads", "1",
            "--weight-sync", setting.get("weight_sync", "tensor"),
            "--rollout-health-timeout", "20", "--save", save, "--save-interval", "1", "--load", save,
            *(TWO_RANKS if setting["ranks"] == 2 else ()), preamble=MARKS,
            env={"TMPDIR": str(directory / "t"), "SOAK_MARKS": str(marks)},
        )  # fmt: skip
        return process, marks

    def fresh_directory(self) -> Path:
        directory = self.work / "run"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        return directory


def kill_when_due(process, marks, plan):
    """Kill the planned process at the planned moment; whether there was one to kill."""
    due = (plan["phase"], plan["rollouts_done"])
    while process.poll() is None and (last_mark(marks) or (0, "", 0))[1:] != due:
        time.sleep(0.005)
    time.sleep(plan["after"])
    try:
        find(last_mark(marks)[0], plan).kill()
    except (LookupError, psutil.Error):
        return False
    return True


def find(pid: int, plan):
    """The process that the plan names, in the run whose controller has this id."""
    trainer = psutil.Process(pid)
    if plan["victim"] == "trainer":
        return trainer
    guards = [p for p in trainer.children() if "sglang_patches.serve" in p.cmdline()]
    guard = sorted(guards, key=lambda p: p.pid)[plan["engine"]]
    (http,) = guard.children()
    found = {"guard": guard, "http": http, **{p.name(): p for p in http.children()}}
    return found.get(plan["victim"]) or found[f"sglang::{plan['victim']}"]


def last_mark(marks: Path):
    """(process id of the controller, phase, rollouts done) of the phase that a run is in."""
    lines = marks.read_text().splitlines()
    if not lines:
        return None
    pid, phase, done = lines[-1].split()
    return int(pid), phase, int(done)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(": ")[1] for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def describe(kill) -> str:
    return (
        f"{kill['victim']} killed {kill['after']:.2f} s into {kill['phase']} after "
        f"{kill['rollouts_done']} rollouts; {kill['ranks']} ranks, {kill['engines']} engines, "
        f"{kill['weight_sync']}: exit codes {kill['exit_codes']}, hash equal: "
        f"{kill['hash_is_equal']}, left behind: {kill['left_behind'] or 'nothing'} "
        f"({kill['seconds']} s)"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the record")
    parser.add_argument("--kills", type=int, default=20, help="kills in all, earlier ones included")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as work:
        soak = Soak(arguments.json, arguments.seed, Path(work))
        for number in range(len(soak.record["kills"]), arguments.kills):
            soak.run(number)
            print(
                f"{number + 1}/{arguments.kills}: {describe(soak.record['kills'][-1])}", flush=True
            )
    kills = soak.record["kills"]
    bad = [k for k in kills if not k["hash_is_equal"] or k["left_behind"]]
    print(f"{len(kills)} kills, {sum(k['struck'] for k in kills)} struck, {len(bad)} bad")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
