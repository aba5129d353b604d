"""The substitutes for OpenRLHF's modules, while other threads import."""

import sys
from types import ModuleType

from skyasync.interop.openrlhf.user_modules import stand_ins


def test_other_threads_may_import_while_the_stand_ins_come_and_go(monkeypatch):
    class ImportsOnSight(str):
        def partition(self, separator):
            sys.modules.setdefault(f"seen_{len(sys.modules)}", ModuleType("seen"))
            return super().partition(separator)

    monkeypatch.setattr(
        sys, "modules", {**sys.modules, ImportsOnSight("other"): ModuleType("other")}
    )
    with stand_ins():
        from openrlhf.utils import grade_answer
    assert grade_answer("1", "1.0")
    assert "openrlhf" not in sys.modules
