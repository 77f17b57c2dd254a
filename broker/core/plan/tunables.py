"""The numbers of the decisions: what each is, its unit, the range in which it makes sense, and why it is what it is.

Nothing that the plans weigh by is written anywhere else (a test sees to that). Found by simulation where no other reason is
given (ops/decisions/0010 and later). Reasons that go on from one line to the next end in a comma.
"""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value", bound="float | tuple[float, ...]")


def tunable(value: Value, unit: str, least: float, most: float, why: str) -> Value:
    """The value.

    Raises:
        ValueError: it is out of its range, or has no unit or reason.
    """
    numbers = value if isinstance(value, tuple) else (value,)
    if not unit or not why or not all(least <= number <= most for number in numbers):
        raise ValueError(f"{value}: must be from {least} to {most} {unit}, with a reason")
    return value


# --- what things are worth, in devices

CLASS_WORTH = tunable((3000.0, 1000.0, 300.0, 50.0), "devices", 1, 100000, "all load of a Gold, Silver, Bronze, Batch model")
DEVICE_PRICE = tunable(1.0, "devices", 0.1, 10, "the unit: what lacks a thousandth of a value of 1,000 weighs one")
LOAD_PRICE = tunable(0.2, "devices/s", 0, 5, "per second of a load on each of its devices: what moves has a price")
REPLICA_PRICE = tunable(0.02, "devices", 0, 1, "per replica on each of its devices: what is not needed goes")
THRIFT = tunable(0.3, "devices", 0, 2, "of every change beside its price, where changes compare by gain per price")
CRAMPED_DEVICES = tunable(5.0, "devices", 0, 50, "a model's share of time that it turned out to need is worth so many,")
CRAMPED_LACK_MAX = tunable(0.02, "share", 0, 0.2, "but no more than this part of its load")
IDLE_PRICE = tunable(20.0, "devices", 1, 49, "of an idle model's place: below the lowest class's second, above a device,")
IDLE_HALF_S = tunable(600.0, "s", 10, 86400, "and half of it after so long: the least recently used goes first")
# --- turns

KEEP_S = tunable(1800.0, "s", 0, 604800, "without a request for so long a model may go (default of strategy.keep_s)")
IDLE_S = tunable(1.0, "s", 0.2, 60, "without a request for so long a model is idle and leaves for others at once")
RESIDENCY_S = tunable(6.0, "s", 0, 120, "a replica serves so long (or as long as its load took) before it may leave")
TURN_S = tunable(8.0, "s", 1, 120, "a busy model's last replica yields to who has waited longer (or residency and load)")
WAIT_BOUND_S = tunable(20.0, "s", 1, 300, "who has waited so long bids as the highest class does: nobody starves")
LATE_S = tunable(1.0, "s", 0.1, 60, "requests that wait so long have waited: seats, idle places and advice are looked for")
FAILING_IDLE_S = tunable(60.0, "s", 1, 3600, "a model whose load failed gets only places unused for so long")
BIDS_MAX = tunable(32, "models", 4, 1000, "bidders of one look, the most urgent first: it must stay short in a large pool,")
SITES_MAX = tunable(4096, "devices", 64, 100000, "and looks at no more than so many devices in all")
# --- the plan's pace

LOOK_S = tunable(1.0, "s", 0.2, 10, "cadence of the whole layout, of concurrency bounds, advice and readings")
CALM_S = tunable(5.0, "s", 0, 60, "replicas move, and neighbours are asked to go, only after such a pause")
CLOSE_S = tunable(1.0, "s", 0, 30, "a closed replica can be had back for so long, at least")
AGAIN_S_MAX = tunable(0.5, "s", 0, 30, "its requests go on elsewhere once that costs no more in prefill than this,")
AGAIN_SHARE = tunable(0.03, "share", 0, 1, "and so much of the time since it closed: waiting longer pays less;")
CLOSED_S_MAX = tunable(240.0, "s", 1, 3600, "or when they have had so long")
WATCH_S = tunable(30.0, "s", 0, 600, "a new leader knows no history: so long it gives nothing up,")
TRIALS_MAX = tunable(1500, "changes", 100, 100000, "of the layout in one search, in pools up to LARGE_DEVICES; fewer above,")
TRIALS_MIN = tunable(400, "changes", 50, 100000, "but so many however large the pool")
LARGE_DEVICES = tunable(96, "devices", 1, 10000, "above it there is no whole plan, and relief only for a large lack")
REPLAN_S = tunable(10.0, "s", 1, 600, "cadence of a whole new plan,")
REPLAN_GAIN = tunable(0.8, "devices", 0, 10, "which is taken if it is better by so many, its loads counted")
RELIEF_LACK = tunable(0.001, "share", 0, 0.5, "who lacks more in vain may cost neighbours places, not their last one;")
RELIEF_LACK_LARGE = tunable(0.05, "share", 0, 0.5, "the same in large pools")
TRIES = tunable(2, "models", 1, 20, "models relieved, and devices emptied in turn, at one look")
LACK_GROWN = tunable(0.02, "share", 0, 0.5, "who could not be helped is tried again if it lacks so much more")
LACK_FREE = tunable(0.2, "share", 0, 0.9, "of a need that may be lacking before anything is done, and of it at most")
LACK_REPLICAS = tunable(0.25, "replicas", 0, 2, "so many: what is given up must leave all of it")
KV_LACK_FREE = tunable(0.12, "share", 0, 0.9, "the same for KV")
TAKEOVERS_MAX = tunable(16, "groups", 1, 1000, "of linked devices that others may leave for one wide replica")
GROUPS_MAX = tunable(70, "choices", 1, 10000, "of a group's devices that are looked at for one replica that spans several,")
PLACES_MAX = tunable(280, "choices", 1, 100000, "and of all groups together, but one of each, and its empty devices")
SHARING_KEEPS = tunable(0.97, "share", 0.5, 1, "of a device's speed that is left when several replicas take turns on it")
STARVED_POWER = tunable(3, "-", 1, 10, "a replica too slow for its longest prompts counts by its share to this")
# --- concurrency, KV and spares

TPOT_RUN = tunable(0.75, "share", 0.1, 1, "of the time per token at which the number of requests at once is bounded")
SLOTS_MIN = tunable(4, "requests", 1, 64, "no bound is lower: batches are what makes steps cheap")
TPOT_USED = tunable(0.65, "share", 0.1, 1, "of the time per token that plans use: the rest is for bursts and errors")
KV_TOKENS_MIN = tunable(20_000, "tokens", 256, 1000000, "a replica that can grow begins with: more than a usual prompt")
GROW_BY = tunable(0.1, "share", 0, 1, "of its KV by which a replica grows at least,")
SHRINK_BY = tunable(0.15, "share", 0, 1, "and shrinks: smaller changes are not worth it")
START_FACTOR = tunable(1.5, "x", 1, 10, "a newcomer gets so many times what it will need, where that is free")
ROUNDING_BYTES = tunable(1 << 20, "bytes", 0, 1_073_741_824, "left free beside a start with another KV than the record's")
SPARE_LEVEL = tunable(1.3, "x", 0, 5, "spares cover so many times the level of a model's bursts; 0: there are none")
SPARES_MAX = tunable(6, "replicas", 0, 100, "of one model")
SPARE_LIFE_S_MAX = tunable(10.0, "s", 1, 600, "models of longer requests get no spares: a rush would weigh too long,")
SPARE_BESIDE_SHARE_MAX = tunable(0.5, "share", 0, 1, "nor do devices of models that need more than half of their time")
SPARE_SHARE = tunable(0.45, "share", 0.05, 1, "of a device that a spare has in a rush: a neighbour works there too")
# --- need

CHUNK_TOKENS = tunable(4096, "tokens", 128, 65536, "that one step takes while prompts queue (workers.core.pulling)")
NEED_KEEP_S = tunable(8.0, "s", 0, 600, "the most that was needed lately is kept so long at least,")
NEED_KEEP_LIVES = tunable(1.0, "lives", 0, 10, "and so many times as long as a request runs: replicas end with theirs")
QUEUE_DRAIN_S = tunable(3.0, "s", 0.5, 60, "what waits should be served within: it is late already")
QUEUE_REPLICAS_MAX = tunable(4.0, "replicas", 1, 64, "asked for at once for what waits: more would each serve too little")
QUEUE_FREE_S = tunable(0.3, "s", 0, 10, "work that may wait without asking for more")
SEATS_FULL_SHARE = tunable(0.9, "share", 0.1, 1, "of seats taken, from which what waits late has seats at once")
TOKEN_S = tunable(0.04, "s", 0.001, 1, "time per token that is assumed where none runs")
KV_FACTOR = tunable(1.25, "x", 1, 4, "KV room over what running requests hold")
KV_KEEP_S = tunable(30.0, "s", 1, 3600, "the most KV and seats that were needed lately are kept so long")
SHARE_KEEP_S = tunable(60.0, "s", 1, 3600, "and so long the share of time; idle for so long, a model needs none")
ACTIVITY_S = tunable(20.0, "s", 1, 600, "mean over which a model counts as being at work or not, for its neighbours")
TTFT_USED = tunable(0.75, "share", 0.1, 1, "of the time to the first token that such a prompt's own prefill may take")
PATIENCE_S = tunable(10.0, "s", 0.1, 600, "answers this long let half of what bursts of prompts take go")
SHARE_LEAST = tunable(0.4, "share", 0.05, 1, "of a device that a model with a replica can count on for a moment")
LENGTH_BINS = tunable(
    (40, 0.01, 1.15), "bins, s, x", 0.001, 1000, "prompts by their time alone: bins, the first, and their ratio"
)
FINISHED_MIN = tunable(20, "requests", 1, 1000, "after so many the mean answer is known, and not only expected")
SEATS_FACTOR = tunable(1.12, "x", 1, 3, "seats over the requests that run: arrivals are not even")
SHARE_MIN_MOST = tunable(0.9, "share", 0.1, 1, "a model is never said to need more of its devices' time")
# --- headroom: rules in the shadow

FAST_S = tunable(1.6, "s", 0.2, 60, "mean by which a model counts as active or not")
LEVEL_S = tunable(600.0, "s", 10, 86400, "the level of bursts is remembered so long")
RULE_MEANS_S = tunable((1.6, 3.0, 12.0), "s", 0.2, 600, "time constants of the rules' means,")
RULE_FACTORS = tunable((1.0, 1.15, 1.3, 1.6), "x", 1, 4, "what they multiply them by,")
RULE_LEVELS = tunable((0.0, 1.0, 1.3, 1.6), "x", 0, 4, "times the level of bursts that they ask for at least,")
RULE_HOLDS_S = tunable((4.0, 8.0, 20.0), "s", 0.4, 600, "and how long they hold what they asked for")
RULE_MISSED_MAX = tunable(0.005, "share", 0, 0.1, "of requests that a rule may have missed")
RULE_MISSED_PRICE = tunable(40.0, "levels", 0, 1000, "of misses below that share, as capacity of the bursts' level,")
RULE_EXCESS_PRICE = tunable(100.0, "levels", 0, 10000, "and above it")
RULE_MEMORY_S = tunable(1200.0, "s", 60, 86400, "old evidence fades within this")
RULE_DELAY_S = tunable(3.4, "s", 0.4, 300, "from asking for capacity to having it, as the shadow takes it")
RULE_DRAIN_S = tunable(10.0, "s", 1, 300, "what waits asks for capacity to be gone within this time")
RULE_CHANGE_S = tunable(4.0, "s", 0, 60, "what it costs to ask for more, as seconds of the capacity asked for")
RULE_ACTIVE_SHARE = tunable(0.05, "share", 0, 1, "of the level of its bursts, above which a model counts as active")
RULE_STEP_S = tunable(0.4, "s", 0.1, 5, "step of the shadow queues")
RULE_CHOOSE_S = tunable(4.0, "s", 0.4, 60, "cadence at which a rule is chosen")
RULE_SETTLE_S = tunable(20.0, "s", 0, 600, "what happens so soon after a model's first request says nothing about a rule")
RULE_REQUESTS = tunable(200.0, "requests", 1, 100000, "below so many the first rule stands")
# --- feedback: what turns out to be too little

MISSED_MEMORY_S = tunable(30.0, "s", 1, 600, "misses are counted over about so long,")
MISSED_PRIOR = tunable(20.0, "requests", 0, 1000, "beside so many that did not miss")
MISSED_FREE = tunable(0.006, "share", 0, 0.2, "that may miss before more load is asked for than is reckoned,")
LOAD_MISSED = tunable(0.3, "1/s", 0, 5, "by so much of it per second and share above it,")
WAIT_SHARE = tunable(0.5, "share", 0.1, 1, "of the time to the first token: while somebody has waited for so much of it")
LOAD_WAITING = tunable(0.03, "1/s", 0, 1, "so much more is asked for per second,")
LOAD_MAX = tunable(0.2, "share", 0, 2, "at most so much")
LOAD_MEMORY_S = tunable(90.0, "s", 5, 3600, "what is asked for on top is forgotten within this,")
LOAD_MEMORY_S_MAX = tunable(600.0, "s", 5, 36000, "twice as slowly, up to this,")
RELAPSE_MEMORY_S = tunable(1800.0, "s", 60, 86400, "which in turn is forgotten within this")
LASTING_S = tunable(600.0, "s", 1, 36000, "misses last when, of the requests of about so long,")
LASTING_PRIOR = tunable(100.0, "requests", 0, 10000, "beside so many that did not miss,")
LASTING_MISSED = tunable(0.008, "share", 0.0001, 0.2, "missed more than this; fully so at twice it")
LASTING_AFTER_S = tunable(90.0, "s", 0, 3600, "misses so soon after the first replica tell of its load only")
LOAD_LASTING = tunable(0.5, "share", 0, 2, "more load that may be asked for while misses last in full,")
SHARE_RISE_S = tunable(60.0, "s", 1, 3600, "and the share of time that is asked for goes from nothing to all within this,")
SHARE_MEMORY_S = tunable(300.0, "s", 1, 36000, "and is forgotten within this")
# --- prospects and forecast

TELLING_PARTS = tunable(4, "looks", 1, 50, "over which what arrived is told to the forecast: it costs time")
ASK_ROUNDS = tunable(5, "rounds", 1, 60, "in one of which a model's forecast is asked for, the models in turn")
HISTORY_S = tunable(86_400.0, "s", 3600, 1209600, "with less there are no seasons, and only declared events count")
SLACK_S = tunable(10.0, "s", 0, 300, "beside the load's own time, until new capacity is of use")
HORIZON_S = tunable(120.0, "s", 10, 1800, "up to which the forecast is asked")
MOMENTS = tunable(4, "moments", 2, 20, "for so many of them: an event may be short")
GAIN_MIN = tunable(0.1, "share", 0, 1, "of what arrives now: a smaller change moves nothing")
FORECAST_ROOM_MAX = tunable(1.5, "x", 1, 4, "room over the expected mean, at most")
EXPECTED_LATE_S = tunable(180.0, "s", 0, 3600, "what usually comes by now is waited for so long")
NOW_S = tunable(60.0, "s", 5, 600, "mean over which 'now' is taken")
WISH_S = tunable(30.0, "s", 1, 600, "what a trigger asked for stays in the plan so long, beside the load's own time")
HITS_KNOWN_MIN = tunable(0.05, "share", 0, 1, "where the best hit ratio is below this there is hardly a prefix to find,")
HITS_MEMORY_S = tunable(3_600.0, "s", 60, 86400, "and the best is remembered so long")
PREFILL_SHARE_MAX = tunable(0.8, "share", 0.1, 0.95, "of a step that prompts may take beside answers, in a profile")
GAP_S = tunable(5.0, "s", 1, 600, "longer silence between two looks is a gap")
EVENTS_MAX = tunable(256, "events", 1, 10000, "declared ones kept; what is over goes first, then the one that ends last")
HORIZONS_S = tunable((1, 3, 10, 120, 1800), "s", 1, 7200, "at which forecasts are judged; in between the nearest counts")
JUDGED_EVERY_S = tunable((5, 5, 10, 30, 300), "s", 1, 3600, "between two judgements, per horizon")
JUDGEMENTS = tunable(
    (150, 150, 120, 120, 288), "judgements", 10, 2000, "that count per horizon: a quarter of an hour to a day"
)
SERIES_MEANS_S = tunable((2.0, 10.0, 60.0, 300.0, 1800.0), "s", 1, 7200, "time constants of the running means")
SLOPE_S = tunable(300.0, "s", 10, 3600, "a slope is followed for that long, fading")
JUDGE_POWER = tunable(5, "-", 1, 20, "how sharply the better forecast is preferred")
SURGE_DEVIATIONS = tunable(8.0, "x", 2, 50, "make a surge: one heavy request after a calm makes 7.4,")
SURGE_REQUESTS_MIN = tunable(4.0, "requests", 1, 100, "and of so many requests at least")
SEASON_HORIZON_S_MIN = tunable(60.0, "s", 1, 3600, "below it the last minutes say more than the time of day")
DAY_LEANING = tunable(0.4, "share", 0, 1, "leaning towards a weak day beats following it (ServeGen)")
DAY_SHARE = tunable(0.35, "share", 0.05, 1, "of a new day against earlier ones: five make up nine tenths;")
WEEK_SHARE = tunable(0.5, "share", 0.05, 1, "and a new week")
# --- triggers, fairness, learning

HIT_RATIO_GROWS_KV = tunable(0.85, "share", 0, 1, "prefix hits below it: KV is too small (SCH-13)")
HIT_RATIO_EVICTS = tunable(0.70, "share", 0, 1, "prefix hits below it")
QUEUE_EVICTS = tunable(50, "requests", 1, 10000, "with more waiting: a neighbour's KV is cut and a replica loaded (SCH-13)")
EVICT_RATIO = tunable(0.30, "share", 0.01, 0.9, "of the neighbour's KV that is cut (SCH-13)")
STALL_S = tunable(0.005, "s", 0.001, 1, "steps that stall for longer contend for compute (SCH-13)")
KV_GROWTH = tunable(1.25, "x", 1, 4, "by which KV grows")
SLOTS_EASED = tunable(0.75, "share", 0.1, 1, "of its slots that are left to who disturbs")
QUIET_S = tunable(10.0, "s", 1, 600, "the same fact is told again only after this, so that an operation can take effect")
FAIR_LEVEL = tunable(0.5, "-", 0, 1, "index below which a class is helped: p95 beyond half its target")
FAIR_MEMORY_S = tunable(10.0, "s", 1, 600, "answers are judged over so long,")
FAIR_SAMPLES = tunable(64, "answers", 4, 10000, "of so many at most")
FAIR_SAMPLES_MIN = tunable(8, "answers", 1, 1000, "and at least")
OUTPUT_TOKEN_WEIGHT = tunable(8.0, "tokens", 1, 100, "prompt tokens that an output token counts as, without costs")
WEIGHT_MAX = tunable(64, "-", 1, 1000, "largest weight of a class,")
BOOST_MAX = tunable(4.0, "x", 1, 50, "by which a class that is treated unfairly is helped at most")
READING_S = tunable(0.2, "s", 0.1, 10, "cadence of readings of what is noisy,")
READINGS_IN_ROW = tunable(3, "readings", 1, 20, "of which so many in a row count")
PERIOD_S = tunable(300.0, "s", 10, 86400, "of observations that make one example")
FTRL_ALPHA = tunable(0.1, "-", 0.001, 10, "learning rate,")
FTRL_BETA = tunable(0.1, "-", 0, 10, "its smoothing,")
FTRL_L2 = tunable(0.02, "-", 0, 10, "and shrinkage (FTRL, SCH-10)")
PASSES = tunable(6, "passes", 1, 100, "over a period's examples: there are few")
EXAMPLE_FADE = tunable(0.97, "share", 0.5, 1, "what is left of an example's pull per period: a third after three hours")
FACTOR_MAX = tunable(2.0, "x", 1, 10, "no pair counts as more than this much slower, or faster, than its profile")
SEEN_MIN = tunable(5, "observations", 1, 1000, "in a period: fewer make no example")
# --- costs

CORRECTION_STEPS = tunable(1000.0, "steps", 10, 100000, "about so many of the last decide on the correction,")
CORRECTED_STEPS_MIN = tunable(200, "steps", 1, 100000, "of fewer nothing is concluded,")
CORRECTION_NEWS = tunable(0.05, "share", 0, 1, "plans hear of one that moved by so much,")
CORRECTION_MAX = tunable(4.0, "x", 1, 100, "and it is no larger, up or down")
DEVIATION_MAX = tunable(0.15, "share", 0.01, 1, "steps that differ by more from what was measured,")
DEVIATION_S = tunable(60.0, "s", 1, 3600, "for so long, ask for a new measurement (PRO-4)")
MEASURED_BATCH_MAX = tunable(8, "requests", 1, 256, "up to which replicas measure themselves (carpool profile: more)")
SERVED_TOKENS = tunable(20_000, "tokens", 100, 1000000, "about so many of the last answers' tell of engines behind a URL")
# --- bounds
KEPT_MAX = tunable(4096, "entries", 16, 1_000_000, "of a table per model, series or replica: memory is bounded")
PER_LOOK = tunable(16, "entries", 1, 1000, "quiet series and examples worked off at one look, in turn")
BIN_S = tunable(300, "s", 60, 3600, "of a day's and a week's shape: 288 of them are a day")
CLASS_SHARES = tunable((8, 4, 2, 1), "turns", 1, 1000, "of Gold, Silver, Bronze and Batch where all requests are alike")
WEIGHT_SCALE = tunable(4, "x", 1, 100, "finer than these shares: densities that differ by a quarter stay apart")
ZERO_RUN_MAX = tunable(64, "-", 4, 10_000, "longer runs without load are closed at once; answers and points kept")
