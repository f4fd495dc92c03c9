from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.engine.fairness import MAX_DEBTS, OUTPUT_WEIGHT, PROMPT_WEIGHT, FairShares

ROWS, MOST_PROMPT, MOST_OUTPUT = 3, 20, 12
#: What the module promises: P + 2 Q.
BOUND = PROMPT_WEIGHT * MOST_PROMPT + OUTPUT_WEIGHT * ROWS * MOST_OUTPUT


def waiting(shares, *tenants):
    accounts = [shares.open(tenant) for tenant in tenants]
    for account in accounts:
        shares.wait(account)
    return accounts


def test_nobody_waits_at_first():
    assert FairShares().next() is None


def test_the_least_counter_is_next_and_of_equals_who_waited_longest():
    shares = FairShares()
    a, b, c = waiting(shares, "a", "b", "c")
    turns = []
    for tokens in 5, 5, 9, 1, 2:
        turns.append(shares.next())
        turns[-1].charge(tokens)
    assert turns == [a, b, c, a, b]


def test_who_rests_is_passed_over_and_has_to_queue_among_equals_again():
    shares = FairShares()
    a, b = waiting(shares, "a", "b")
    shares.rest(a)
    shares.rest(a)
    assert shares.next() is b
    shares.wait(a)
    shares.wait(a)
    assert shares.next() is b


def test_a_newcomer_is_lifted_to_the_least_of_those_who_wait():
    shares = FairShares()
    a, b = waiting(shares, "a", "b")
    a.charge(70)
    b.charge(50)
    [late] = waiting(shares, "late")
    assert late.counter == 50
    assert shares.next() is b


def test_after_a_lull_a_newcomer_is_lifted_to_where_the_last_one_left():
    shares = FairShares()
    [a] = waiting(shares, "a")
    a.charge(70)
    shares.rest(a)
    a.charge(8)
    assert waiting(shares, "late")[0].counter == 70


def test_a_tenant_that_sends_one_request_after_the_other_keeps_its_debt():
    shares = FairShares()
    flood, serial = waiting(shares, "flood", "serial")
    flood.charge(1)
    shares.next().charge(1000)
    shares.rest(serial)
    shares.close(serial)
    waiting(shares, "serial")
    turns = []
    while shares.next() is flood:
        shares.next().charge(100)
        turns.append(flood.counter)
    assert turns[-1] == 1001
    assert shares.next() is serial


def test_who_owes_nothing_is_forgotten():
    shares = FairShares()
    [a] = waiting(shares, "a")
    a.charge(5)
    [b] = waiting(shares, "b")
    shares.rest(b)
    shares.close(b)
    assert not shares.debts
    assert set(shares.accounts) == {"a"}


@pytest.mark.parametrize("charge", [0, 7])
def test_tenants_that_come_and_go_leave_little_behind(charge):
    shares = FairShares()
    [stays] = waiting(shares, "stays")
    for number in range(3 * MAX_DEBTS):
        [guest] = waiting(shares, f"guest {number}")
        guest.charge(charge)
        shares.rest(guest)
        shares.close(guest)
        assert len(shares.debts) <= MAX_DEBTS
        assert len(shares._heap) <= 70
    assert set(shares.accounts) == {"stays"}
    assert shares.next() is stays
    newest = f"guest {3 * MAX_DEBTS - 1}"
    assert list(shares.debts)[-1:] == ([newest] if charge else [])


class Ledger:
    """The same, naively, and it never forgets."""

    def __init__(self):
        self.counters = {}
        self.line = []
        self.last = 0

    @property
    def floor(self):
        return min((self.counters[t] for t in self.line), default=self.last)

    def wait(self, tenant):
        if tenant not in self.line:
            self.counters[tenant] = max(self.counters.get(tenant, 0), self.floor)
            self.line.append(tenant)

    def rest(self, tenant):
        if tenant in self.line:
            self.line.remove(tenant)
            if not self.line:
                self.last = self.counters[tenant]

    def next(self):
        return min(self.line, key=self.counters.get) if self.line else None


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["open", "wait", "rest", "close", "charge", "serve", "serve"]),
        st.sampled_from("abcde"),
        st.integers(0, 30),
    ),
    max_size=120,
)


@pytest.mark.slow
@given(ACTS)
@settings(max_examples=300, deadline=None)
def test_turns_and_counters_are_those_of_a_naive_ledger_that_never_forgets(acts):
    shares, ledger = FairShares(), Ledger()
    floor = 0
    for act, tenant, tokens in acts:
        account = shares.accounts.get(tenant)
        if act == "open":
            shares.open(tenant)
        elif act == "serve" and shares.next():
            ledger.counters[shares.next().tenant] += tokens
            shares.next().charge(tokens)
        elif account is None or act == "serve":
            continue
        elif act == "charge":
            ledger.counters[tenant] = ledger.counters.get(tenant, 0) + tokens
            account.charge(tokens)
        elif act == "close":
            if account.holds == 1:
                ledger.rest(tenant)
                shares.rest(account)
            shares.close(account)
        else:
            getattr(ledger, act)(tenant)
            getattr(shares, act)(account)
        turn = shares.next()
        assert (turn and turn.tenant) == ledger.next()
        assert all(shares.accounts[t].counter == ledger.counters[t] for t in ledger.line)
        assert shares.floor == ledger.floor >= floor
        floor = shares.floor


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, MOST_PROMPT), st.integers(1, MOST_OUTPUT)),
        st.tuples(st.just("tokens"), st.integers(1, MOST_OUTPUT), st.just(0)),
        st.tuples(st.just("guest"), st.integers(0, 4), st.booleans()),
    ),
    max_size=150,
)


def differences(events):
    """An engine of a few rows: how far the first of two that always wait is ahead, over time."""
    shares = FairShares()
    first, second = waiting(shares, "first", "second")
    guests = [shares.open(f"guest {i}") for i in range(5)]
    running = []
    for act, number, more in events:
        if act == "guest":
            (shares.wait if more else shares.rest)(guests[number])
        elif act == "admit" and len(running) < ROWS:
            turn = shares.next()
            turn.charge(PROMPT_WEIGHT * number)
            running.append([turn, more])
        for _ in range(number if act == "tokens" else 0):
            for row in running:
                row[0].charge(OUTPUT_WEIGHT)
                row[1] -= 1
            running = [row for row in running if row[1]]
        yield first.counter - second.counter


@pytest.mark.slow
@given(EVENTS)
@settings(max_examples=400, deadline=None)
def test_two_tenants_that_always_wait_differ_by_no_more_than_a_constant(events):
    ahead = [0, *differences(events)]
    assert max(map(abs, ahead)) <= BOUND
    assert max(ahead) - min(ahead) <= 2 * BOUND


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(0, 1000))
def test_time_in_which_a_tenant_asked_for_nothing_gives_it_no_credit(charges, head_start):
    shares = FairShares()
    busy, other = waiting(shares, "busy", "other")
    busy.charge(head_start)
    for tokens in charges:
        shares.next().charge(tokens)
    [idle] = waiting(shares, "idle")
    before = {account: account.counter for account in (busy, other, idle)}
    for tokens in charges:
        shares.next().charge(tokens)
    served = {account: account.counter - before[account] for account in before}
    least = min((busy, other), key=before.get)
    assert served[idle] <= served[least] + max(charges)
