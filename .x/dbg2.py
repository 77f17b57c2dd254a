from tests.core.test_placement_property import *
import tests.core.test_placement_property as P
sc=Scenario(seed=4496, sizes=(0.5, 1.0, 0.5, 0.5, 2.0), devices=((1.0,), (0.5, 1.5), (0.5,)), arrivals=(Arrival(model=3, at_s=9.536466020247848e-266, service_s=0.1), Arrival(model=0, at_s=21.160200224483283, service_s=0.1), Arrival(model=0, at_s=17.12218697408477, service_s=0.1), Arrival(model=0, at_s=6.684169458898059, service_s=0.1), Arrival(model=0, at_s=16.63345355123771, service_s=5.0), Arrival(model=4, at_s=4.429174770298046, service_s=0.1), Arrival(model=4, at_s=9.426741808394706e-111, service_s=0.1), Arrival(model=1, at_s=9.491688923509136, service_s=1.0), Arrival(model=2, at_s=12.656015399718475, service_s=0.1), Arrival(model=4, at_s=4.52482335239268, service_s=1.0), Arrival(model=0, at_s=28.718375840607358, service_s=0.1)), load_times=(0.2, 1.0, 4.0, 0.2, 4.0), broken=frozenset({1, 2}), loss=0.0, deaths=(), freezes=((1, 0.03, 2.308502231205747),), pauses=(), wide=frozenset({3}), meddles=False)
P.SETTLE_S=60.0
W=[]
orig=P.World
class WW(orig):
    def __init__(s,*a,**k): W.append(s); super().__init__(*a,**k)
P.World=WW
try: P.play(sc); print("fine")
except AssertionError as e: print(e)
w=W[0]
for r in w.requests:
    if r.ended_s is None: print(r)
v=w.core.views.build(w.now_s)
for m in v.models.values(): print('   ', m.record.name, m.waiting, m.oldest_wait_s, [(r.state.value,r.devices,r.budget_bytes/GIB) for r in m.replicas], m.may_load, m.fails, m.leaving, m.failed_on)
for d in v.devices.values(): print('   ', d.key, d.free_planned_bytes/GIB, d.memory_bytes/GIB, d.link)
print(w.core.actions.dropped)
for e in w.core.digests.timeline(0)[-12:]: print(e.at_unix_s, e.action,e.model,e.device,e.reason,e.outcome)
