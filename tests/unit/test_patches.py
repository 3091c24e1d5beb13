"""What djjobs changes in DataJoint, and when: little when it is imported, the rest when a table has the mixin.

Each test is an interpreter of its own, because nothing of this can be undone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import datajoint as dj
import pytest
from sources import ROOT

MODERN = not dj.__version__.startswith("0.")

#: Looks at every class and function that DataJoint has, at two moments.
LOOK = """
import importlib, json, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import datajoint as dj
for module in pkgutil.iter_modules(dj.__path__, "datajoint."):
    try:
        importlib.import_module(module.name)
    except Exception:  # some need more than is installed
        pass

def look():
    found = {"config": frozenset(getattr(dj.config, "_conf", ()))}
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if name.partition(".")[0] == "datajoint" else ():
            if isinstance(value, set):
                found[f"{name}.{attribute}"] = frozenset(value)
            elif getattr(value, "__module__", None) == name:
                found[f"{name}.{attribute}"] = value
                if isinstance(value, type):
                    found.update({f"{attribute}.{own}": it for own, it in vars(value).items()})
    return found

def changed(before, after):
    def is_same(name):
        one, other = before.get(name, look), after.get(name, look)
        return one is other or (isinstance(one, frozenset) and one == other)
    return sorted(name for name in {**before, **after} if not is_same(name))

untouched = look()
"""

#: What events need before there is a table to tell; and the setting, which only adds a name.
AT_IMPORT = {"Table.insert", "Table.delete_quick", "Config.min_scheduling_interval" if MODERN else "config"}
#: The rest of what events need, and class methods. Tables of both DataJoints have it.
ALWAYS = {
    "Connection.start_transaction",
    "Connection.commit_transaction",
    "Connection.cancel_transaction",
    "Connection.query",
    "Connection.in_transaction",
    "datajoint.user_tables.supported_class_attrs",
}
#: `schema.jobs`, and what 0.14 has behind it.
JOBS = (
    {"_Schema.jobs"}
    if MODERN
    else {
        "Schema.jobs",
        "JobTable._djjobs",
        "JobTable.__init__",
        "JobTable.complete",
        "JobTable.error",
        "JobTable.ignore",
        "JobTable.insert",
        "JobTable.reserve",
    }
)


def changes_after(code: str) -> set[str]:
    """What is not as it was in DataJoint after `import djjobs` and this."""
    report = "print(json.dumps(changed(untouched, look())))"
    program = "\n".join([LOOK, "import djjobs", textwrap.dedent(code), report])
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_an_import_alone_changes_only_what_events_need() -> None:
    assert changes_after("import djjobs.worker, djjobs.check") == AT_IMPORT


TABLE = "class Spectrum({bases}):\n    definition = 'n : int'"
ADOPTED = """
schema = dj.Schema()
@schema
class Spectrum(dj.Computed):
    definition = "n : int"
assert djjobs.adopt(schema) == [Spectrum]
"""


@pytest.mark.parametrize(
    "code",
    [TABLE.format(bases="djjobs.JobsMixin, dj.Computed"), TABLE.format(bases="djjobs.Imported"), ADOPTED],
    ids=["the mixin", "a base class", "adopted"],
)
def test_the_first_table_with_the_mixin_brings_the_rest(code: str) -> None:
    assert changes_after(code) == AT_IMPORT | ALWAYS | JOBS


def test_a_second_table_changes_nothing_more() -> None:
    first, second = (TABLE.format(bases="djjobs.Computed").replace("Spectrum", name) for name in ("First", "Second"))
    assert changes_after(f"{first}\nuntouched = look()\n{second}") == set()


def test_the_setting_and_tables_without_the_mixin_change_nothing_more() -> None:
    code = """
    dj.config["min_scheduling_interval"] = 17
    assert djjobs.settings.min_scheduling_interval == 17
    djjobs.settings.min_scheduling_interval = 18
    assert dj.config["min_scheduling_interval"] == 18
    """
    assert changes_after(textwrap.dedent(code) + TABLE.format(bases="dj.Computed")) == AT_IMPORT
