"""What an entry must be like to be booked. A group's line stops at the first that is not: the rest is a fault.

Our own workers send nothing else; but one that is broken, or a stranger in Redis, must not stop the others.
"""

from workers.chip_time import AnyEntry, Opened, Released, Step

MAX_TEXT = 200
"""What the tables' columns hold."""
_MAX_WORD = 64
_MAX_NS = 10**18
"""30 years."""
_MAX_CALENDAR_NS = 4 * 10**18
_MAX_CHIPS = 10**6
_MAX_CHIP_NS = 10**17
"""Of one entry: sums of a group stay within 64 bits."""
_MAX_COUNT = 10**12


def flaw(entry: AnyEntry, end_ns: int, num_chips: int) -> str:
    """Why `entry` cannot follow one that ended at `end_ns` of a group of `num_chips`; "" if it can."""
    if entry.begin_ns != end_ns:
        return f"it begins at {entry.begin_ns}, and the entry before ended at {end_ns}"
    if not entry.begin_ns <= entry.end_ns <= _MAX_NS:
        return f"it ends at {entry.end_ns}, and begins at {entry.begin_ns}"
    if num_chips * (entry.end_ns - entry.begin_ns) > _MAX_CHIP_NS:
        return "it is too long"
    if isinstance(entry, Opened | Released) and entry.end_ns != entry.begin_ns:
        return "it should have no length"
    if isinstance(entry, Opened):
        return _of_opened(entry)
    return _of_requests(entry) or (_of_step(entry) if isinstance(entry, Step) else "")


def is_text(text: str, longest: int = MAX_TEXT) -> bool:
    """Whether both databases can hold it."""
    return len(text) <= longest and "\0" not in text


def _of_opened(opened: Opened) -> str:
    if opened.number:
        return "the group has been opened before"
    if not (1 <= opened.num_chips <= _MAX_CHIPS):
        return f"a group of {opened.num_chips} chips"
    if not (0 <= opened.granted_unix_ns <= _MAX_CALENDAR_NS):
        return f"it was granted at {opened.granted_unix_ns}"
    are_texts = is_text(opened.model) and is_text(opened.worker_id)
    if not (are_texts and is_text(opened.sku, _MAX_WORD) and is_text(opened.region, _MAX_WORD)):
        return "a name is too long, or no text"
    return ""


def _of_requests(entry: AnyEntry) -> str:
    for joined in entry.joined:
        names = (joined.request_id, joined.key_id, joined.tag)
        if not all(is_text(name) for name in names):
            return "a name is too long, or no text"
        if not _are_counts(joined.num_prompt_tokens, joined.num_choices):
            return "a number of a request's beginning is out of range"
    for ended in entry.ended:
        if not is_text(ended.request_id):
            return "a name is too long, or no text"
        if not _are_counts(ended.num_output_tokens, ended.num_cached_tokens):
            return "a number of a request's end is out of range"
    return ""


def _of_step(step: Step) -> str:
    if min(step.idle_ns, step.bubble_ns, step.compile_ns, step.length_ns) < 0:
        return "a part of it is shorter than nothing"
    if not is_text(step.bucket) or not _are_counts(step.step, step.num_padded, step.num_rejected):
        return "a number of the step is out of range"
    for member in step.members:
        if not _are_counts(member.num_tokens, member.context_len, member.num_cached):
            return f"tokens of {member.request_id[:MAX_TEXT]!r} are out of range"
        if not is_text(member.request_id):
            return "a name is too long, or no text"
    return ""


def _are_counts(one: int, other: int, third: int = 0) -> bool:
    return 0 <= one <= _MAX_COUNT and 0 <= other <= _MAX_COUNT and 0 <= third <= _MAX_COUNT
