/**
 * Transactions that begin with their first statement: BEGIN, deadline and id go in one message with it. Only without locks, and
 * at READ COMMITTED, where every statement sees what is committed when it starts: at higher levels one could tell when the
 * transaction was begun. And only where nothing is in between, which might judge a message by its first statement.
 */
import type { Capabilities } from "../../../seam/capabilities.ts";
import type { Begun, Later, Open, Result, SqlConnection, Step } from "../../../seam/database.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import { over } from "../../../context/revocable.ts";
import { begin, begunOf, isNotKept, verify } from "./index.ts";
import { render } from "../dialect.ts";
import { checked } from "../locks/index.ts";
import { beginStep, opening, usualOpening } from "./opening.ts";

export function beginLater(
  connection: SqlConnection,
  capabilities: Capabilities,
  open: () => Open,
): Later<SqlConnection> | undefined {
  const { isolation, locks } = open();
  if (!connection.sequence || capabilities.details?.["direct"] !== true) return undefined;
  return isolation === "read committed" && locks.length === 0 ? new Opening(connection, open) : undefined;
}

type Sequence = NonNullable<SqlConnection["sequence"]>;

class Opening implements Later<SqlConnection> {
  readonly connection: SqlConnection;
  readonly #target: SqlConnection;
  readonly #open: () => Open;
  #begun: Promise<Begun> | undefined;
  #over = false;

  constructor(target: SqlConnection, open: () => Open) {
    this.#target = target;
    this.#open = open;
    // The same connection, except for what may be sent first.
    this.connection = Object.assign(Object.create(target) as SqlConnection, {
      query: (statement: Statement) => this.#ask(statement, false, () => target.query(statement)),
      ...(target.prepared && {
        prepared: (statement: Statement) =>
          this.#ask(statement, true, () => target.prepared?.(statement) as Promise<Result>),
      }),
      sequence: (steps: readonly Step[]) => this.#send(steps),
      // A message of several statements whose answers are lost if one fails: whether it has begun would not be known.
      script: undefined,
    });
  }

  begin(): Promise<Begun> {
    return this.#begun ?? this.#begins(begin(this.#target, this.#open()).then(({ begun = {} }) => begun));
  }

  end(): Promise<Begun> | undefined {
    this.#over = true;
    return this.#begun;
  }

  #begins(begun: Promise<Begun>): Promise<Begun> {
    this.#begun = begun;
    // Who waits for it is told, and at the latest who ends the transaction.
    begun.catch(() => {});
    return begun;
  }

  async #ask(statement: Statement, kept: boolean, ask: () => Promise<Result>): Promise<Result> {
    if (this.#over) throw over();
    if (this.#begun) return this.#begun.then(ask);
    const { text, values } = render(statement, this.#target.names);
    // Several statements in one text can only be a message of their own.
    if (text.includes(";")) return this.begin().then(ask);
    const [answer] = this.#send([{ text, values, kept }]);
    return answer as Promise<Result>;
  }

  #send(steps: readonly Step[]): readonly Promise<Result>[] {
    if (this.#over) throw over();
    const { sequence } = this.#target as { sequence: Sequence };
    const sent = this.#begun ? this.#begun.then(() => sequence(steps)) : this.#beginWith(sequence, steps);
    return steps.map((_, i) => {
      const answer = sent.then((answers) => answers[i] as Promise<Result>);
      answer.catch(() => {});
      return answer;
    });
  }

  async #beginWith(sequence: Sequence, steps: readonly Step[]): Promise<readonly Promise<Result>[]> {
    const open = this.#open();
    const first = this.#together(sequence, open, steps).catch(async (error: unknown) => {
      if (!isNotKept(this.#target, error)) throw error;
      // None of it was run, and from now on the client keeps nothing.
      await this.#target.query(sql.raw("ROLLBACK"));
      return this.#together(sequence, open, steps);
    });
    void this.#begins(first.then(({ begun }) => begun));
    return (await first).answers;
  }

  async #together(
    sequence: Sequence,
    open: Open,
    steps: readonly Step[],
  ): Promise<{ readonly begun: Begun; readonly answers: readonly Promise<Result>[] }> {
    const checks = checked(this.#target);
    const usual = usualOpening(open, checks);
    const opens: Step = usual?.step() ?? { text: opening(open, [], checks), values: [] };
    const [, opened, ...answers] = sequence([beginStep(open), opens, ...steps]);
    const row = (await opened)?.rows[0];
    // What the session was to keep, and does not: nothing after it was run.
    for (const [i, answer] of answers.entries())
      if (steps[i]?.kept)
        await answer.catch((error: unknown) => {
          if (isNotKept(this.#target, error)) throw error;
        });
    verify(row, open);
    return { begun: await begunOf(this.#target, row, open), answers };
  }
}
