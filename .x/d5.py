import tests.sim.nodes as N
import broker.core.plan.coordinator as C
from tests.sim.world import run_seed
old=C.Coordinator.decide; n=[0]
def dec(self, now_s, view):
    d=old(self,now_s,view); n[0]+=1
    if n[0]%60==0:
        print(round(now_s,1), [(m.record.name,m.waiting,m.oldest_wait_s,len(m.replicas),m.may_load,m.fails,m.leaving,m.record.budget_bytes, m.record.costs) for m in view.models.values()], [(d2.key,d2.memory_bytes,d2.free_planned_bytes,d2.device_type,d2.engines) for d2 in view.devices.values()], d)
    return d
C.Coordinator.decide=dec
try: run_seed(8)
except Exception as e: print(e)
