import time
from workloads.squares import *
from pipelines import *
def test_a(schema, tmp_path):
    log = CallLog(tmp_path/"l")
    S = squares(schema, 5000, logging_make(log))
    t=time.time()
    r = in_processes(schema, 16, lambda i: S.populate(reserve_jobs=True, order="original"))
    print(time.time()-t, [x["success_count"] for x in r], len(log.lines()), len(set(l[0] for l in log.lines())), job_counts(S))
def test_b(schema, tmp_path):
    log = CallLog(tmp_path/"l")
    S = squares(schema, 5000, logging_make(log))
    t=time.time()
    r = in_processes(schema, 16, lambda i: S.populate(reserve_jobs=True, order="random"))
    print(time.time()-t, [x["success_count"] for x in r], len(log.lines()), len(set(l[0] for l in log.lines())), job_counts(S))
def test_c(schema, tmp_path):
    log = CallLog(tmp_path/"l")
    S = squares(schema, 5000, logging_make(log))
    t=time.time()
    r = in_processes(schema, 16, lambda i: S.populate("n<=2500" if i%2 else "n>2500", reserve_jobs=True))
    print(time.time()-t, [x["success_count"] for x in r], len(log.lines()), len(set(l[0] for l in log.lines())), job_counts(S))
