"""The statements about schedules and their firings."""

from __future__ import annotations


class ScheduleStatements:
    """What can be done to the rows of `~schedules`, `~firings` and `~leader`.

    Each statement is a transaction by itself. So a suspended scheduler keeps nothing locked that the next leader needs.
    What a scheduler does to a schedule has a guard in the same statement: only the leader may do it. There is a role
    for each target, so that schedulers for other tables do not stand in the way.
    """

    _leading = """EXISTS (SELECT 1 FROM {leader}
                       WHERE role = %(role)s AND leader = %(leader)s AND expires > {now})"""

    add_leader = "INSERT INTO {leader} (role, expires) VALUES (%(role)s, {now}) {or_skip[role]}"

    #: Become the leader, or stay the leader. Who changed the row is the leader. `since` comes first, because MySQL sets
    #: one column after the other.
    lead = """
        UPDATE {leader} SET since = CASE WHEN leader = %(leader)s THEN since ELSE {now} END, leader = %(leader)s,
               {user} = %(user)s, host = %(host)s, pid = %(pid)s, expires = {now} + {seconds[expiry]}
        WHERE role = %(role)s AND (leader = %(leader)s OR expires <= {now})"""

    resign = "UPDATE {leader} SET expires = {now} WHERE leader = %(leader)s AND expires > {now}"

    #: Who leads in which role, until when, and what time it is.
    living_leaders = "SELECT role, host, pid, expires, {now} FROM {leader} WHERE expires > {now}"

    forget_leaders = "DELETE FROM {leader} WHERE expires < {now} - {seconds[retention]}"

    add_schedule = """
        INSERT INTO {schedules} (name, target, what, every, cron, timezone, created_by, created, next_time)
        VALUES (%(name)s, %(target)s, %(what)s, %(every)s, %(cron)s, %(timezone)s, %(user)s, {now}, %(next)s)
        {or_skip[name]}"""

    remove_schedule = "DELETE FROM {schedules} WHERE name = %(name)s"
    forget_firings_of = "DELETE FROM {firings} WHERE name = %(name)s"

    pause_schedule = "UPDATE {schedules} SET enabled = 0 WHERE name = %(name)s AND enabled <> 0"
    resume_schedule = "UPDATE {schedules} SET enabled = 1, next_time = %(next)s WHERE name = %(name)s AND enabled = 0"

    #: The driver cannot read a time outside these years. It would fail for all rows.
    _schedules = """
        SELECT name, target, what, every, cron, timezone, enabled,
               CASE WHEN next_time BETWEEN '1000-01-01' AND '9999-01-01' THEN next_time END
        FROM {schedules} """
    find_schedules = _schedules + "ORDER BY name"
    find_schedule = _schedules + "WHERE name = %(name)s"

    #: Nothing is inserted if the firing is there already, if another firing of the schedule runs, or if `{guard}` is
    #: false.
    fire = """
        INSERT INTO {firings} (name, fire_time, state, running, missed_since, by_hand, runner, expires, {user}, host,
                               pid, started, ended, outcome)
        SELECT due.schedule, %(fire_time)s, %(state)s, %(running)s, %(missed_since)s, %(by_hand)s, %(runner)s,
               {now} + {seconds[expiry]}, %(user)s, %(host)s, %(pid)s, {now},
               CASE WHEN %(running)s IS NULL THEN {now} END, %(outcome)s
        FROM (SELECT name AS schedule FROM {schedules} WHERE name = %(name)s {guard}) AS due
        {or_skip[name]}"""
    still_due = "AND enabled <> 0 AND next_time = %(due)s AND " + _leading

    #: The firing that an earlier leader has entered, if it died before it said when the schedule is due again.
    entered_already = (
        "SELECT {catalog}MAX(fire_time) FROM {firings} WHERE name = %(name)s AND fire_time >= %(due)s AND by_hand = 0"
    )

    #: The schedule was fired, by this leader or by an earlier one. Now it is due at another time. If the firing has
    #: ended already, what it said of its end stays. (MySQL assigns from left to right, so `last_time` comes after its
    #: use.)
    advance = (
        """
        UPDATE {schedules}
        SET last_state = CASE WHEN last_time = %(fire_time)s THEN last_state ELSE (SELECT state {fired}) END,
            last_outcome = CASE WHEN last_time = %(fire_time)s THEN last_outcome ELSE (SELECT outcome {fired}) END,
            last_time = %(fire_time)s, next_time = %(next)s
        WHERE name = %(name)s AND enabled <> 0 AND next_time = %(due)s AND EXISTS (SELECT 1 {fired}) AND """
        + _leading
    )
    fired = "FROM {firings} AS fired WHERE fired.name = %(name)s AND fired.fire_time = %(fire_time)s"

    #: Only if it says something new, so that nothing is written again and again. What a firing says comes first.
    note_unfired = """
        UPDATE {schedules} SET last_state = %(state)s, last_outcome = %(outcome)s
        WHERE name = %(name)s AND last_state <> 'running' AND last_outcome <> %(outcome)s"""

    running_firing = "SELECT fire_time, host, pid FROM {firings} WHERE name = %(name)s AND running = 1"

    #: Firings whose process has not been heard of for too long.
    find_lost_firings = """
        SELECT name, fire_time, runner, attempt, host, pid FROM {firings}
        WHERE running = 1 AND expires <= {now} AND fire_time BETWEEN '1000-01-01' AND '9999-01-01'"""

    _still_lost = (
        """
        WHERE name = %(name)s AND fire_time = %(fire_time)s AND running = 1 AND runner = %(lost)s AND expires <= {now}
          AND """
        + _leading
    )

    take_up_firing = (
        """
        UPDATE {firings} SET runner = %(runner)s, attempt = attempt + 1, expires = {now} + {seconds[expiry]},
               {user} = %(user)s, host = %(host)s, pid = %(pid)s"""
        + _still_lost
    )

    _my_firing = "WHERE name = %(name)s AND fire_time = %(fire_time)s AND running = 1 AND runner = %(runner)s"

    #: One at a time, by its key. By the runner alone, MySQL would wait for a firing that a stranger keeps locked.
    keep_firing = "UPDATE {firings} SET expires = {now} + {seconds[expiry]} " + _my_firing

    #: This comes before `end_firing`. If the process dies in between, another one takes the firing up and says it
    #: again.
    note_outcome = (
        """
        UPDATE {schedules} SET last_time = %(fire_time)s, last_state = %(state)s, last_outcome = %(outcome)s
        WHERE name = %(name)s AND EXISTS (SELECT 1 FROM {firings} """
        + _my_firing
        + ")"
    )

    end_firing = (
        "UPDATE {firings} SET state = %(state)s, running = NULL, ended = {now}, outcome = %(outcome)s " + _my_firing
    )

    #: Let the next leader run it at once, as if it had not been begun.
    give_back_firing = "UPDATE {firings} SET expires = {now}, attempt = attempt - 1 " + _my_firing

    forget_firings = "DELETE FROM {firings} WHERE running IS NULL AND fire_time < {now} - {seconds[retention]}"
