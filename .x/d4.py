from tests.core.test_policy_actions import *
wide, wider = record("wide", 3.0, gpus=2), record("wider", 1.0, gpus=8)
full = Pool(A, B, wide)
full.resizes = False
full.core.policy = Coordinator()
for gpu in (0, 1, 2):
    full.has("a" if gpu else "b", gpu, gib=2.0)
full.has("wide-not", 3, gib=4.0)
full.step(ModelApplied(record("wide-not", 4.0, pinned=True)))
full.tell()
import broker.core.plan.coordinator as C
old=C.Coordinator._plan
def plan(self,look):
    d=old(self,look)
    for n in look.problem.needs: print(n)
    for b in look.problem.placed: print(b)
    print([(s.kind,s.memory_bytes/2**30,s.group) for s in look.problem.sites], d)
    return d
C.Coordinator._plan=plan
print(commands(full.demand(wide=0.2, b=(1, 0.0))))
print(full.core.actions.dropped)
