"""Configurations of the reference picker are sorted by what becomes of them (`bench/configs.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[3] / "bench" / "configs.py"
PICKER = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: {plugin}
- type: queue-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
"""


def test_what_is_refused_has_a_reason_and_a_mistake_is_told_from_what_is_missing(tmp_path: Path) -> None:
    plugins = {
        "same.yaml": "max-score-picker", "missing.yaml": "session-affinity-filter", "mistake.yaml": "nonsense",
        "noted.yaml": "precise-prefix-cache-producer",
    }  # fmt: skip
    for name, plugin in plugins.items():
        (tmp_path / name).write_text(PICKER.format(plugin=plugin))
    (tmp_path / "other.yaml").write_text("policy: round-robin\n")
    (tmp_path / "broken.yaml").write_text("kind: [\n")
    command = [sys.executable, str(PROGRAM), "--json"]
    environment = {**os.environ, "CONFIGS": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same_meaning"] == ["same.yaml"]
    assert list(found["noted"]) == ["noted.yaml"]
    assert list(found["refused"]) == ["broken.yaml", "missing.yaml", "mistake.yaml"]
    assert all(found["refused"].values())
    assert found["unlisted"] == ["broken.yaml", "mistake.yaml"]
    assert found["other"] == ["other.yaml"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path / "gone")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "gone" in done.stderr
