from tests.core.test_outlook import *
model = record("a", max_replicas=2)
bench = settled(model)
bench.report(worker=V)
bench.demand(a=(8, 2.0))
out = commands(bench.report(listed("a", running=8, idle_s=0.0), gib=4.0))
p=bench.core.policy
print(out)
import broker.core.plan.coordinator as C
old=C.Coordinator._plan
def plan(self,look):
    d=old(self,look)
    print(look.problem.needs, [(s.kind,s.memory_bytes/2**30) for s in look.problem.sites], d)
    return d
C.Coordinator._plan=plan
bench.tick(1.2, beats=(W,V))
