"""Agents as a program, good and bad, by the label of their row: nothing of onpolicy is imported."""

import json
import os
import subprocess
import sys
import time
import urllib.request


def ask(row, path="/chat/completions", **more):
    body = {"model": row["model"], "messages": [{"role": "user", "content": row["prompt"]}], **more}
    headers = {"Authorization": f"Bearer {row['api_key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        row["base_url"] + path, json.dumps(body).encode(), headers=headers
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def answer(row, times=1, **said):
    line = json.dumps({"api_key": row["api_key"], **said}) + "\n"
    print(times * line, end="", flush=True)  # at once: the first one ends an episode


def play(row):
    text = ask(row)
    match row["label"]:
        case "rewarded":
            answer(row, reward=len(row["label"]), metrics={"own": 2}, info={"text": text})
        case "silent":
            pass
        case "pays itself":
            print('{"reward": 100}')  # as an agent that prints what the policy said
        case "twice":
            answer(row, times=2, reward=1.0)
        case "told":
            known = {k: v for k, v in os.environ.items() if k.startswith(("OPENAI", "ANTHROPIC"))}
            own = json.loads(os.environ["ONPOLICY_ROW"]) == row
            answer(row, info={"row": row, "own": own, "known": known, "no": os.environ["NO_PROXY"]})
        case "fails":
            print("\x1b[31mno such tool", file=sys.stderr)
            sys.exit(3)
        case "dies":
            os.kill(os.getpid(), 9)
        case "loud":
            for _ in range(64):
                print("x" * (1 << 16), end="")  # one line of 4 MiB
                print("y" * (1 << 16), file=sys.stderr)
            print()
            answer(row, reward=0.5)
        case "leaves":
            child = subprocess.Popen(["sleep", "3600"])
            away = subprocess.Popen(["sleep", "3600"], start_new_session=True)
            answer(row, info={"child": child.pid, "away": away.pid})
        case "waits":
            child = subprocess.Popen(["sleep", "3600"])
            with open(row["metadata"]["file"], "w") as file:
                json.dump([os.getpid(), child.pid], file)
            child.wait()
        case "leaves early":
            sys.exit()
        case "takes a second":
            begun = time.monotonic()
            time.sleep(1)
            answer(row, info={"span": [begun, time.monotonic()]})
        case "at once":
            answer(row, info={"pid": os.getpid()})
        case other:
            print(other.format(key=row["api_key"]))


if __name__ == "__main__":
    for line in sys.stdin:
        play(json.loads(line))
