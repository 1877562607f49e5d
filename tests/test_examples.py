"""The examples and the README's quick start, run as a user runs them."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from multihost import train as multihost  # noqa: E402

README = (ROOT / "README.md").read_text()


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def quick_start() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return block


def test_jobset_starts_what_train_py_takes():
    """As the container's shell would; names as JobSet gives them to the pods' DNS."""
    text = (ROOT / "examples" / "multihost" / "jobset.yaml").read_text()
    jobset, policy = yaml.safe_load_all(text)
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    pod = job["template"]
    (container,) = pod["spec"]["containers"]
    assert job["completionMode"] == "Indexed"  # sets JOB_COMPLETION_INDEX
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    (script,) = container["args"]
    line = subprocess.run(
        [*container["command"], script.replace("exec python", "echo")],
        env={"JOB_COMPLETION_INDEX": "3"}, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert line[0] == "train.py"
    args = multihost.parse(line[1:])
    name = jobset["metadata"]["name"]
    assert args.coordinator == f"{name}-{group['name']}-0-0.{name}:8476"
    assert group["replicas"] == 1
    assert args.processes == job["completions"] == job["parallelism"]
    assert args.process_id == 3
    (mount,) = container["volumeMounts"]
    assert str(args.checkpoints).startswith(mount["mountPath"])
    assert [v["name"] for v in pod["spec"]["volumes"]] == [mount["name"]]
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert chosen == pod["metadata"]["labels"]
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": chosen}}]


def test_quick_start_is_short_and_learns():
    block = quick_start()
    lines = [line for line in block.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 20
    prefix = "import jax; jax.config.update('jax_num_cpu_devices', 8)\n"
    phase, loss, sent = run("-W", "error", "-c", prefix + block).split(" ", 2)
    assert phase == "compressed"
    assert float(loss) < 0.3  # 0.43 is the variance of the target: predicting 0
    assert "'reduce'" in sent


@pytest.mark.parametrize("name", ["linen_digits", "linen_stage_3", "bare_jax"])
def test_digits(name):
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 120
    out = run(str(path), "--steps", "100", "--devices", "4")
    assert float(out.rsplit("test accuracy ", 1)[1]) > 0.93


@pytest.mark.slow
def test_float16():
    """From a scale that overflows down to one that fits."""
    out = run("examples/float16.py", "--steps", "100", "--devices", "4", "--scale", "1e9")
    first, *_, last = re.findall(r"scale (\S+), (\d+) steps skipped", out)
    assert 1 <= int(first[1]) < 20
    assert float(last[0]) < 1e9
    assert float(out.rsplit("test accuracy ", 1)[1]) > 0.93


def test_train_gpt(tmp_path):
    args = ["--compare", "--steps", "12", "--devices", "2", "--out", str(tmp_path)]
    out = run("examples/train_gpt.py", *args)
    report = json.loads((tmp_path / "report.json").read_text())
    ours, dense = report["runs"]
    assert set(ours) == {
        "name",
        "stage",
        "val_loss",
        "wire_bits_per_param",
        "bytes_per_step",
        "persistent_bytes_per_device",
    }
    assert ours["stage"] == 2
    assert ours["wire_bits_per_param"]["steady"] < 0.25 * dense["wire_bits_per_param"]["steady"]
    assert ours["wire_bits_per_param"]["steady"] < ours["wire_bits_per_param"]["run"]
    assert ours["val_loss"] < 5.0  # log 256 = 5.55 at the start
    assert ours["val_loss"] == pytest.approx(dense["val_loss"], rel=0.02)
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert (tmp_path / "sample.txt").read_text().startswith("def ")
    assert "held-out loss over dense" in out


def test_train_gpt_at_stage_3(tmp_path):
    args = ["--stage", "3", "--fast", "2", "--steps", "8", "--devices", "4"]
    run("examples/train_gpt.py", *args, "--out", str(tmp_path))
    (ours,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert ours["stage"] == 3
    assert ours["val_loss"] < 5.3
    assert ours["bytes_per_step"]["layer_gather"] > 0


@pytest.mark.parametrize(
    "argument", [("--stage", "4"), ("--gather-bits", "5"), ("--steps", "0"), ("--devices", "-1")]
)
def test_train_gpt_refuses(argument):
    done = subprocess.run(
        [sys.executable, "examples/train_gpt.py", *argument],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert argument[1] in done.stderr.splitlines()[-1]
