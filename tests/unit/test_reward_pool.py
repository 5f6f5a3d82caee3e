"""Rewards in processes of their own: whatever a function does, its neighbours are scored and the trainer goes on."""

import concurrent.futures
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from spmd_rl.batch import Prompt
from spmd_rl.config import RewardsConfig
from spmd_rl.rewards import RewardError, Rewards

TIMEOUT_S = 1.5
NAP = f"1000.{os.getpid()}"  # seconds: names this run's children
SOURCE = """
import asyncio, ctypes, os, re, signal, subprocess, sys, time

def poison(completions, completion_ids, **columns):
    kind, = completions
    if kind == "hang":
        time.sleep(1000)
    elif kind == "busy":
        while True:
            pass
    elif kind == "regular expression":
        re.match("(a+)+$", "a" * 40 + "b")
    elif kind == "hang with children":
        subprocess.Popen(["sleep", "NAP"], start_new_session=True)
        subprocess.run(["sleep", "NAP"])
    elif kind == "ignores signals":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    elif kind == "exit":
        sys.exit(3)
    elif kind == "hard exit":
        os._exit(3)
    elif kind == "segmentation fault":
        ctypes.string_at(0)
    elif kind == "kills itself":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "closes everything":
        os.closerange(3, 100)
        time.sleep(1000)
    elif kind == "memory":
        return [len(bytearray(2**33))]
    elif kind == "memory in small parts":
        hold = []
        while True:
            hold.append(bytearray(2**20))
    elif kind == "nan":
        return [float("nan")]
    elif kind == "infinity":
        return [-float("inf")]
    elif kind == "beyond a float":
        return [10**400]
    elif kind == "none":
        return [None]
    elif kind == "raises":
        raise KeyError("broken")
    elif kind == "deep":
        f = lambda: f()
        f()
    elif kind == "scalar":
        return 1.0
    elif kind == "too many":
        return [1.0, 1.0]
    elif kind == "text":
        return ["good"]
    elif kind == "nothing":
        return None
    elif kind == "generator":
        return (1.0 for _ in completions)
    return [float(len(completion_ids[0]))]

def leaves_a_mark(completions, **columns):
    open(completions[0], "w").close()
    return [1.0]

def after(completions, **columns):
    return [0.5]

begun = 0

async def judge(completions, **columns):
    global begun
    kind, = completions
    if kind.startswith("all of "):
        begun += 1
        while begun < int(kind.removeprefix("all of ")):
            await asyncio.sleep(0.01)
    elif kind == "blocks":
        time.sleep(1000)
    elif kind == "hang":
        await asyncio.sleep(1000)
    elif kind == "exit":
        os._exit(1)
    elif kind == "raises":
        raise KeyError("broken")
    await asyncio.sleep(0.1)
    return [1.0]
"""
# What a completion makes the function do -> the outcome that is documented.
OUTCOMES = {
    "hang": "timeout", "busy": "timeout", "regular expression": "timeout", "hang with children": "timeout",
    "ignores signals": "timeout", "exit": "crash", "hard exit": "crash", "segmentation fault": "crash",
    "kills itself": "crash", "closes everything": "crash", "memory": "memory", "memory in small parts": "memory",
    "nan": "not_finite", "infinity": "not_finite", "beyond a float": "not_finite", "raises": "error", "deep": "error",
    "scalar": "wrong_result", "too many": "wrong_result", "text": "wrong_result", "nothing": "wrong_result",
    "generator": "wrong_result", "none": None, "fine": None,
}


@pytest.fixture
def make(tmp_path):
    """A function from names (and options) to Rewards of them, closed after the test."""
    made = []

    def rewards(*names, **fields):
        path = tmp_path / "poison.py"
        path.write_text(SOURCE.replace("NAP", NAP))
        functions = [name if name in ("math_verify", "regex") else f"{path}:{name}" for name in names]
        options = dict(num_workers=2, timeout_s=TIMEOUT_S, memory_gib=0.2, on_error="skip") | fields
        made.append(Rewards(RewardsConfig(functions=functions, **options), 8))
        return made[-1]

    yield rewards
    for rewards_ in made:
        rewards_.close()


def scored(rewards, completion, texts, **columns):
    """Completions with these texts and two tokens each, scored."""
    completions = [completion([1, 2], text=text, group=i) for i, text in enumerate(texts)]
    rewards.score([Prompt(i, "p", [1], columns) for i in range(len(texts))], completions)
    return completions


def test_every_poison_has_its_outcome_and_harms_no_other(make, completion, capfd):
    """All kinds in one step, a healthy completion after each: outcomes as documented, neighbours scored 2 and 0.5.

    The poisoned completions have no reward of that function, and still that of the function after it; a process that a
    reward has started ends with it.
    """
    kinds = [text for kind in OUTCOMES for text in (kind, "fine")]
    completions = scored(make("poison", "after"), completion, kinds)
    for done, kind in zip(completions, kinds, strict=True):
        assert done.failures == ({"poison": OUTCOMES[kind]} if OUTCOMES[kind] else {}), kind
        assert done.rewards == [2.0 if kind == "fine" else None, 0.5], kind
        assert done.reward == (2.5 if kind == "fine" else 0.5)
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", NAP]]
    assert "reward poison, row 0: timeout: longer than rewards.timeout_s, 1.5" in capfd.readouterr().err


def test_a_failed_reward_may_have_a_value(make, completion):
    """rewards.failed_reward -1 in place of none: it counts in the sum, and is counted as failed all the same."""
    done, = scored(make("poison", "after", failed_reward=-1.0), completion, ["nan"])
    assert (done.rewards, done.reward, done.failures) == ([-1.0, 0.5], -0.5, {"poison": "not_finite"})


@pytest.mark.parametrize("kind", ["raises", "scalar", "too many", "text"])
def test_a_mistake_of_the_function_ends_the_run_by_default(make, completion, kind):
    """The message has function, row, reason and completion."""
    with pytest.raises(RewardError, match=f"(?s)reward poison, row 1: (error|wrong_result): .*{kind}"):
        scored(make("poison", on_error="raise"), completion, ["fine", kind])


RESULTS = {"scalar": 1.0, "too many": [1.0, 1.0], "none at all": [], "text": ["good"], "nothing": None,
           "nested": [[1.0]], "dictionary": {"score": 1.0}}
FUNCTIONS = """
RESULTS = {results!r}

def plain(completions, **columns):
    return RESULTS[completions[0]]

async def awaited(completions, **columns):
    return RESULTS[completions[0]]

def returns_awaitable(completions, **columns):
    return awaited(completions)

def compute_score(solution_str, ground_truth):
    found = RESULTS[solution_str]
    return found if solution_str in ("text", "nested") else {{"acc": found}}

async def judge(solution_str, ground_truth):
    return compute_score(solution_str, ground_truth)
"""


@pytest.mark.parametrize("form", ["plain", "awaited", "returns_awaitable", "compute_score", "judge"])
def test_case_28_a_wrong_result_is_found_in_every_form_of_function(tmp_path, completion, form):
    """Plain, async, giving an awaitable, and verl's two: a wrong length or type, or no `score`, is counted and never a
    number; one value for a completion is right where it is a list."""
    path = tmp_path / "forms.py"
    path.write_text(FUNCTIONS.format(results=RESULTS))
    rewards = Rewards(RewardsConfig(functions=[f"{path}:{form}"], on_error="skip", num_workers=1))
    for done, kind in zip(scored(rewards, completion, list(RESULTS), ground_truth="x"), RESULTS, strict=True):
        is_verl = form in ("compute_score", "judge") and kind not in ("text", "nested")
        assert done.failures == {form: "error" if is_verl else "wrong_result"}, kind
        assert done.rewards == [None] and done.reward is None
    rewards.close()


def test_async_functions_run_together(make, completion):
    """40 calls, each of which waits until all have begun, with one worker; then one that hangs, one that blocks its
    event loop, one that exits and one that raises are found out, and no other is lost."""
    texts = ["ok"] * 12 + ["hang", "blocks", "exit", "raises"]
    random.Random(0).shuffle(texts)
    rewards = make("judge", num_workers=1)
    assert [c.reward for c in scored(rewards, completion, ["all of 40"] * 40)] == [1.0] * 40
    expected = {"ok": {}, "hang": {"judge": "timeout"}, "blocks": {"judge": "timeout"}, "exit": {"judge": "crash"},
                "raises": {"judge": "error"}}
    for done, text in zip(scored(rewards, completion, texts), texts, strict=True):
        assert (done.failures, done.reward) == (expected[text], None if expected[text] else 1.0), text


def test_scoring_goes_on_while_the_trainer_is_busy(make, completion, tmp_path):
    """What was submitted is done before it is asked for: each leaves its mark while the trainer does other things."""
    rewards = make("leaves_a_mark")
    marks = [tmp_path / f"mark-{number}" for number in range(4)]
    completions = [completion([1], text=str(mark)) for mark in marks]
    for done in completions:
        rewards.submit(Prompt(0, "p", [1], {}), done)
    deadline = time.monotonic() + 60
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline, sorted(tmp_path.iterdir())
        time.sleep(0.02)
    assert all(c.reward is None for c in completions)
    rewards.collect()
    assert all(c.reward == 1.0 for c in completions)


def test_what_a_function_prints_is_seen(tmp_path, completion, capfd):
    """At once, though its process is never ended in peace; one that runs on is ended with its detail."""
    path = tmp_path / "mine.py"
    path.write_text("import os, signal\ndef score(completions, **columns):\n    print('saw', completions[0])\n"
                    "    if completions[0] == 'y': os.kill(os.getpid(), 36)\n    return [1.0]\n")
    rewards = Rewards(RewardsConfig(functions=[f"{path}:score"], num_workers=1))
    scored(rewards, completion, ["x", "y"])
    rewards.close()
    captured = capfd.readouterr()
    assert "saw x\n" in captured.out and "saw y\n" in captured.out and "crash: signal 36" in captured.err


def test_a_step_follows_another(make, completion):
    """Nothing of a step is left for the next, also after poison."""
    rewards = make("poison")
    for _ in range(3):
        assert [c.reward for c in scored(rewards, completion, ["fine", "hard exit", "fine"])] == [2.0, None, 2.0]


def test_a_file_that_cannot_be_loaded_in_a_process_ends_the_run(tmp_path, completion):
    """It loads in the trainer and not there: the traceback is shown, and nobody waits."""
    path = tmp_path / "mine.py"
    path.write_text("import os\n"
                    f"if os.getpid() != {os.getpid()}: raise OSError('no such device')\n"
                    "def score(completions, **columns): return [1.0]\n")
    rewards = Rewards(RewardsConfig(functions=[f"{path}:score"]))
    with pytest.raises(RuntimeError, match="(?s)cannot be loaded.*no such device"):
        scored(rewards, completion, ["x"])
    rewards.close()


def test_a_server_that_is_killed_ends_the_run(make, completion):
    """A RuntimeError, not a wait for ever."""
    rewards = make("poison")
    scored(rewards, completion, ["fine"])
    os.kill(rewards._pool._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="server of the reward processes has ended with -9"):
        scored(rewards, completion, ["fine"])


TRAINER = """
import os, sys, time
from spmd_rl.batch import Completion, Prompt
from spmd_rl.config import RewardsConfig
from spmd_rl.rewards import Rewards

rewards = Rewards(RewardsConfig(functions=[sys.argv[1] + ":poison"], timeout_s=1000, num_workers=2), 8)
for text in ("hang with children", "busy"):
    rewards.submit(Prompt(0, "p", [1], {}), Completion(0, 0, [1], [1], [0.0], "stop", 0, text=text))
copy = os.fork()  # of the trainer's end of the socket: the server does not see it closed
if copy == 0:
    time.sleep(1000)
print(copy, flush=True)
time.sleep(1000)
"""


def is_alive(process):
    """Not ended; one that nobody has fetched the end of (whose parent has ended, say) is."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_trainer_leaves_no_process(tmp_path):
    """Server and workers, one of them in a loop that never ends, and what they have started, in a session of its own
    too, go with the trainer, however that ends."""
    (tmp_path / "poison.py").write_text(SOURCE.replace("NAP", NAP))
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(TRAINER), str(tmp_path / "poison.py")],
                               stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    copy = psutil.Process(int(trainer.stdout.readline()))
    deadline = time.monotonic() + 30
    while len(family := psutil.Process(trainer.pid).children(recursive=True)) < 6:
        assert time.monotonic() < deadline, family
        time.sleep(0.1)
    trainer.kill()
    trainer.wait()
    others = [process for process in family if process != copy]
    deadline = time.monotonic() + 30
    while alive := [process for process in others if is_alive(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
    copy.kill()  # it has held the socket open to the end
    assert len(others) == 5


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("where", ["main thread", "thread pool"])
def test_case_25_math_is_verified_from_any_thread_and_process(completion, where, num_workers):
    """1/3 against a boxed 1/3 is 1 from the main thread, a thread pool, and a child process: math-verify's own
    time-outs are alarm signals, which raise anywhere but in a main thread."""
    pytest.importorskip("math_verify")
    rewards = Rewards(RewardsConfig(functions=["math_verify"], num_workers=num_workers))

    def score():
        done = completion([1], text=r"\boxed{1/3}")
        rewards.score([Prompt(0, "p", [1], {"answer": "1/3"})], [done])
        return done.reward

    if where == "main thread":
        assert score() == 1.0
    else:
        with concurrent.futures.ThreadPoolExecutor() as threads:
            assert threads.submit(score).result() == 1.0
    rewards.close()


def answers(count, seed=0):
    """(gold, completion, right score): integers, fractions and short LaTeX, every third one wrong."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        a, b = draw.randrange(2, 1000), draw.randrange(2, 100)
        wrong = i % 3 == 0
        gold, text = [(f"{a}", f"so it is {a + wrong}"), (f"{a}/{b}", rf"hence \boxed{{\frac{{{a + wrong}}}{{{b}}}}}"),
                      (rf"\sqrt{{{a}}}", rf"Thus $\sqrt{{{a + wrong}}}$.")][i % 7 % 3]
        made.append((gold, text, 0.0 if wrong else 1.0))
    return made


POISON = [r"\boxed{9^{9^{9^{9^{9}}}}}", r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
          r"\boxed{10^{10^{10}}!}", r"\boxed{\frac{1}{" * 300 + "2" + "}}" * 300]


@pytest.mark.parametrize("prompts, poisonous, timeout_s", [
    (40, 4, 2.5), pytest.param(2000, 20, 5.0, marks=pytest.mark.long)])
def test_ordinary_answers_are_scored_beside_poisonous_ones(completion, prompts, poisonous, timeout_s):
    """8 completions a prompt by math-verify, some of which would take it for ever: every ordinary one has its score,
    and the poisonous ones end in their limit, in 1 / workers of their seconds beside the rest."""
    pytest.importorskip("math_verify")
    rewards = Rewards(RewardsConfig(functions=["math_verify"], num_workers=2, timeout_s=timeout_s))
    wanted = answers(prompts * 8)
    draw = random.Random(1)
    poisoned = dict.fromkeys(draw.sample(range(len(wanted)), poisonous))
    places = {place: POISON[n % len(POISON)] for n, place in enumerate(poisoned)}
    completions, rows = [], []
    for place, (gold, text, _) in enumerate(wanted):
        completions.append(completion([1], text=places.get(place, text)))
        rows.append(Prompt(place // 8, "p", [1], {"answer": gold}))
    rewards.score(rows[:1], completions[:1])  # starts the processes
    start = time.monotonic()
    rewards.score(rows, completions)
    seconds = time.monotonic() - start
    for place, (done, (gold, text, right)) in enumerate(zip(completions, wanted, strict=True)):
        if place not in places:
            assert (done.reward, done.failures) == (right, {}), (gold, text)
        else:
            assert done.reward != 1.0 and done.failures in ({}, {"math_verify": "timeout"}, {"math_verify": "memory"})
    failed = sum(bool(c.failures) for c in completions)
    print(f"{len(wanted)} completions in {seconds:.1f} s, {failed} of {poisonous} poisonous ones ended by a limit")
    assert failed >= poisonous // 4
    # 10 ms an ordinary one on two loaded cores; each poisonous one no longer than its limit.
    assert seconds < 0.02 * len(wanted) + poisonous * (timeout_s + 1)
    rewards.close()
