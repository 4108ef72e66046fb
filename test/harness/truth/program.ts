/**
 * Small programs for actors, as data, so that the explorer, the brute force and a thread of its own can each run them.
 */

export type Operation =
  | {
      readonly do: "send";
      /** `{v}` stands for the number that was read last. */
      readonly text: string;
      /** Keeps what it reads out of what the actor returns: numbers of sequences differ from run to run. */
      readonly hidden?: boolean;
    }
  | {
      readonly do: "transaction";
      readonly begin: readonly string[];
      readonly body: readonly Operation[];
      /** After a deadlock or a serialization failure. */
      readonly retries: number;
    }
  | {
      readonly do: "savepoint";
      readonly body: readonly Operation[];
      readonly back: "always" | "on error" | "never";
    }
  | { readonly do: "if below"; readonly limit: number; readonly body: readonly Operation[] }
  | { readonly do: "repeat"; readonly times: number; readonly body: readonly Operation[] }
  /** A lock of the session, which is given back whatever happens. */
  | {
      readonly do: "locked";
      readonly lock: string;
      readonly unlock: string;
      readonly body: readonly Operation[];
    };

export interface ActorProgram {
  readonly body: readonly Operation[];
  /** What it tells of what it has read. */
  readonly returns: "nothing" | "last" | "all";
  /** With placeholders: another way to send statements, which the explorer reads as well. */
  readonly prepared: boolean;
}

export type Value = string | number | null;
export interface Answer {
  readonly rows: readonly (readonly Value[])[];
  readonly changed: number;
}

export type RefusalKind =
  "deadlock" | "serialization" | "locked" | "busy" | "duplicate" | "violation" | "lost" | "other";

/** What a server said to a statement, by kinds that all servers have. */
export class Refused extends Error {
  readonly kind: RefusalKind;

  constructor(kind: RefusalKind, text: string) {
    super(text);
    this.name = kind;
    this.kind = kind;
  }
}

const again: ReadonlySet<string> = new Set(["deadlock", "serialization", "busy"]);

/** One call of an actor: yields its statements, and is resumed with their answers. */
export function* interpret(actor: ActorProgram): Generator<string, unknown, Answer> {
  let last = 0;
  let log: Value[] = [];
  let savepoints = 0;
  function* all(body: readonly Operation[]): Generator<string, void, Answer> {
    for (const operation of body) yield* one(operation);
  }
  function* one(operation: Operation): Generator<string, void, Answer> {
    switch (operation.do) {
      case "send": {
        const { rows, changed } = yield operation.text.replaceAll("{v}", String(last));
        const values = rows.flat();
        if (operation.text.startsWith("SELECT")) last = Number(values.at(-1) ?? 0);
        if (operation.hidden) return;
        log.push(...(operation.text.startsWith("SELECT") ? [rows.length, ...values] : [changed]));
        return;
      }
      case "if below":
        if (last < operation.limit) yield* all(operation.body);
        return;
      case "repeat":
        for (let i = 0; i < operation.times; i++) yield* all(operation.body);
        return;
      case "locked":
        yield operation.lock;
        try {
          yield* all(operation.body);
        } finally {
          yield operation.unlock;
        }
        return;
      case "savepoint": {
        const name = `s${++savepoints}`;
        yield `SAVEPOINT ${name}`;
        try {
          yield* all(operation.body);
        } catch (error) {
          if (operation.back !== "on error" || !(error instanceof Refused)) throw error;
          if (again.has(error.kind) || error.kind === "lost") throw error;
          log.push(error.kind);
          yield `ROLLBACK TO SAVEPOINT ${name}`;
          return;
        }
        yield operation.back === "always" ? `ROLLBACK TO SAVEPOINT ${name}` : `RELEASE SAVEPOINT ${name}`;
        return;
      }
      case "transaction":
        return yield* transaction(operation);
    }
  }
  function* transaction({
    begin,
    body,
    retries,
  }: Extract<Operation, { do: "transaction" }>): Generator<string, void, Answer> {
    const before = { last, log: [...log] };
    for (let attempt = 0; ; attempt++) {
      try {
        for (const text of begin) yield text;
        yield* all(body);
        yield "COMMIT";
        return;
      } catch (error) {
        if (!(error instanceof Refused) || error.kind === "lost") throw error;
        yield "ROLLBACK";
        if (attempt >= retries || !again.has(error.kind)) throw error;
        ({ last, log } = { last: before.last, log: [...before.log] });
      }
    }
  }
  yield* all(actor.body);
  return actor.returns === "all" ? log : actor.returns === "last" ? (log.at(-1) ?? null) : null;
}

/** Lets an actor run to its end. */
export async function act(actor: ActorProgram, send: (text: string) => Promise<Answer>): Promise<unknown> {
  const program = interpret(actor);
  let step = program.next();
  while (!step.done) {
    const answer = await Promise.allSettled([send(step.value)]);
    step = answer[0].status === "fulfilled" ? program.next(answer[0].value) : program.throw(answer[0].reason);
  }
  return step.value;
}

/** The same where statements are synchronous calls. */
export function actAtOnce(actor: ActorProgram, send: (text: string) => Answer): unknown {
  const program = interpret(actor);
  let step = program.next();
  while (!step.done) {
    let answer: Answer | undefined;
    let thrown: unknown;
    try {
      answer = send(step.value);
    } catch (error) {
      thrown = error;
    }
    step = answer ? program.next(answer) : program.throw(thrown);
  }
  return step.value;
}

export type FaultName = "crash" | "lost commit" | "twice";

export interface Program {
  readonly index: number;
  /** Statements that fill the tables. */
  readonly rows: readonly string[];
  /** Those that are used. */
  readonly tables: readonly string[];
  readonly actors: Readonly<Record<string, ActorProgram>>;
  readonly faults: readonly FaultName[];
  /** With faults: must the outcome be as if there had been none, or may it be that of a serial order with them? */
  readonly once: boolean;
  /** Whether an actor that gave up may be left out of the serial order. */
  readonly mayGiveUp: boolean;
}

/** For people. */
export function programText(program: Program): string {
  const lines = (body: readonly Operation[], depth: string): string[] =>
    body.flatMap((each) => {
      const within = (head: string, ...rest: string[]) => [
        depth + head,
        ...("body" in each ? lines(each.body, `${depth}  `) : []),
        ...rest.map((line) => depth + line),
      ];
      switch (each.do) {
        case "send":
          return within(each.text);
        case "if below":
          return within(`if {v} < ${each.limit}`);
        case "repeat":
          return within(`${each.times} times`);
        case "locked":
          return within(each.lock, each.unlock);
        case "savepoint":
          return within(`savepoint, back ${each.back}`);
        case "transaction":
          return within(
            `${each.begin.join("; ")}${each.retries > 0 ? ` (${each.retries} retries)` : ""}`,
            "COMMIT",
          );
      }
    });
  return [
    `rows: ${program.rows.join("; ")}`,
    `rule: ${program.mayGiveUp ? "may give up" : "strict"}${program.faults.length > 0 ? `, faults ${program.faults.join()} ${program.once ? "as if once" : "as serial"}` : ""}`,
    ...Object.entries(program.actors).flatMap(([name, { body, returns, prepared }]) => [
      `${name}${prepared ? ", prepared," : ""} returns ${returns}:`,
      ...lines(body, "  "),
    ]),
  ].join("\n");
}
