import { Deadline } from "../waiting/deadline.ts";
import type { Connection } from "../seam/database.ts";
import { type Traces, emit, traced } from "../events/events.ts";
import { Attempt } from "./attempt/attempt.ts";
import { endedBy } from "./attempt/ended-by.ts";
import { failureOf, presented } from "./attempt/errors.ts";
import { isAtCommit } from "./lock-support.ts";
import type { Plan } from "./plan.ts";
import { retrying, wasRolledBack } from "./retry.ts";
import type { InstanceContext } from "./scope.ts";
import type { Body } from "./types.ts";

export type { Plan } from "./plan.ts";
export type { TransactionOptions, Transactor } from "./types.ts";

/** Runs a plan until it is committed, fails for good, or is out of attempts or time. */
export function runTransaction<Native, C extends Connection, T>(
  context: InstanceContext<Native, C>,
  plan: Plan,
  body: Body<Native, T>,
): Promise<T> {
  return traced(
    "holdfast:transaction",
    () => ({ locks: context.names(plan.locks), isolation: plan.isolation, attempts: 1 }),
    (told) => runAttempts(context, plan, body, told),
  );
}

async function runAttempts<Native, C extends Connection, T>(
  context: InstanceContext<Native, C>,
  plan: Plan,
  body: Body<Native, T>,
  told: Traces["holdfast:transaction"] | undefined,
): Promise<T> {
  const deadline = new Deadline(plan.deadlineMs, plan.signal);
  const { retry } = plan;
  const locks = () => context.names(plan.locks);
  let before: { failure: string; delayMs: number } | undefined;
  let run!: Attempt<Native, C>;
  try {
    return await retrying(
      ({ attempt }) => {
        run = new Attempt(context, plan, deadline, attempt);
        if (!before) return run.execute(body);
        if (told) told.attempts = attempt;
        const why = before;
        return traced(
          "holdfast:retry",
          () => ({ attempt, locks: locks(), ...why }),
          () => run.execute(body),
        );
      },
      {
        why: (error) => failureOf(run, error),
        on: retry.on,
        policy: retry,
        attempts: (failure) =>
          wasRolledBack.includes(failure) && isAtCommit(context) ? retry.attemptsAtCommit : retry.attempts,
        wanted: () => !deadline.signal.aborted,
        signal: deadline.signal,
        ended: (error, failure) => endedBy(run, error, failure),
        again({ why: failure, attempt, delayMs }) {
          emit("holdfast:transaction:retry", () => ({ attempt, locks: locks(), failure, delayMs }));
          before = { failure, delayMs };
        },
        async failed(error) {
          throw (await presented(run, error)).error;
        },
      },
    );
  } finally {
    deadline.clear();
  }
}
