/** What a failed schedule shows beyond its kind: a protection that was meant, and why it did not hold. */
import type { Choice, ExploreRun } from "./schedule.ts";
import { footprint, lockCalls, lockedTable, locksRows } from "./statement.ts";

/** What was read or written of a table, by whom, in which choice. */
export interface Access {
  readonly at: number;
  readonly actor: number;
  readonly kind: "read" | "insert" | "write";
  readonly table: string;
  /** The condition, with its values. */
  readonly where: string;
}

/** Something was read, somebody else wrote it, and it was acted on. */
export interface Conflict {
  readonly read: Access;
  readonly write: Access;
  readonly acts: readonly Access[];
}

/** From where to where a choice's transaction goes; undefined: it stands alone. */
interface Span {
  readonly from: number;
  /** The choice that ends it; one after the last: nothing did. */
  to: number;
  how: "commit" | "rollback";
  /** It is of one statement, and nobody's BEGIN. */
  readonly implied: boolean;
}

/** By connection: a statement beside the transaction is not a part of it. */
export function spans(choices: readonly Choice[]): (Span | undefined)[] {
  const open = new Map<number, Span>();
  return choices.map(({ step }, at) => {
    const { kind } = footprint(step.text);
    const begun =
      kind === "begin" || (kind === "other" && /^\s*(?:begin|start transaction)\b/i.test(step.text));
    if (begun || step.opens)
      open.set(step.connection, { from: at, to: choices.length, how: "commit", implied: !begun });
    const span = open.get(step.connection);
    if (span && (kind === "commit" || kind === "rollback")) {
      span.to = at;
      span.how = kind;
      open.delete(step.connection);
    }
    return span;
  });
}

/** Everybody waited for somebody else. Some servers notice it before it is one, and end one of them with the statement that would make it so. */
export const wasDeadlock = ({ deadlocks, choices }: ExploreRun): boolean =>
  deadlocks.length > 0 || choices.some(({ step }) => step.deadlock);

/** A lock that somebody took, and gave back. */
interface Guard {
  readonly actor: number;
  readonly at: number;
  /** The choice with which it was given back; one after the last: nothing did. */
  readonly until: number;
  readonly text: string;
  /** It ends with the transaction that it is taken in. */
  readonly local: boolean;
  readonly called: string;
  /** Of locks by name. */
  readonly name: string | undefined;
  /** Of locks of rows. */
  readonly table: string | undefined;
}

function guards(choices: readonly Choice[], all: readonly (Span | undefined)[]): Guard[] {
  return choices.flatMap(({ chosen, step: { text } }, at) => {
    const until = all[at]?.to ?? at;
    const named = lockCalls(text)
      .filter(({ lasts }) => lasts !== "given back")
      .map(({ lasts, called, name }) => ({
        actor: chosen,
        at,
        until: lasts === "transaction" ? until : givenBack(choices, at, name),
        text,
        local: lasts === "transaction",
        called,
        name,
        table: undefined,
      }));
    // What is locked within a statement that writes it is locked for long enough.
    const rows =
      locksRows(text) && footprint(text).kind === "read"
        ? [
            {
              actor: chosen,
              at,
              until,
              text,
              local: true,
              called: "FOR UPDATE",
              name: undefined,
              table: lockedTable(text),
            },
          ]
        : [];
    return [...named, ...rows];
  });
}

function givenBack(choices: readonly Choice[], from: number, name: string): number {
  const { connection } = choices[from]?.step ?? {};
  const at = choices.findIndex(
    ({ step }, i) =>
      i > from &&
      step.connection === connection &&
      lockCalls(step.text).some((call) => call.lasts === "given back" && call.name === name),
  );
  return at < 0 ? choices.length : at;
}

/** Choices after which an actor goes on outside of a transaction, with a lock of its session: how many of its own that is. */
export function holdsBetween(run: ExploreRun, actor: number): number[] {
  const { choices } = run;
  const all = spans(choices);
  const own = choices.flatMap(({ chosen }, at) => (chosen === actor ? [at] : []));
  const locks = guards(choices, all).filter((lock) => lock.actor === actor && !lock.local);
  return own.flatMap((at, i) => {
    const isLast = i === own.length - 1;
    const inside = all[at] !== undefined && all[at].to !== at;
    return !isLast && !inside && locks.some((lock) => lock.at <= at && at < lock.until) ? [i] : [];
  });
}

/** A lock of a session that was to be given back, and was not there. */
export function notGivenBack({ choices }: ExploreRun): boolean {
  return otherConnection(choices) !== undefined;
}

/** Why what was meant to protect did not; undefined: nothing of the kind is seen. */
export function evidence(run: ExploreRun, conflicts: readonly Conflict[]): string | undefined {
  const { choices } = run;
  const all = spans(choices);
  const locks = guards(choices, all);
  return (
    otherConnection(choices) ??
    refused(run) ??
    outside(locks, all) ??
    tooEarly(choices, locks, conflicts) ??
    sameStatement(choices, locks, conflicts) ??
    otherKeys(locks, conflicts) ??
    samePick(choices, conflicts)
  );
}

const no = new Set(["f", "false", "0", "NULL"]);

function otherConnection(choices: readonly Choice[]): string | undefined {
  for (const { step } of choices) {
    const back = lockCalls(step.text).find(({ lasts }) => lasts === "given back");
    if (!back || !step.rows.some((row) => row.some((value) => no.has(value)))) continue;
    return `${back.called}(${back.name}) answered no: it was sent over another connection than the one that has the lock, which stays locked. A lock of a session is taken and given back on one connection (pool.connect()), or with hf.hold; one of the transaction (hf.transaction({ lock: … })) ends with COMMIT by itself.`;
  }
  return undefined;
}

const duplicate = /duplicate key value|duplicate entry|unique constraint/i;

/** A constraint did what it is for, and nobody expected it. */
function refused({ choices, results }: ExploreRun): string | undefined {
  const found = choices.find(
    ({ chosen, step }) => duplicate.test(step.error ?? "") && results[chosen]?.status === "rejected",
  );
  if (!found) return undefined;
  const name = /constraint "([^"]+)"|key '([^']+)'|failed: ([\w., ]+)/i.exec(found.step.error ?? "");
  const [table = ""] = footprint(found.step.text).writes;
  return `The UNIQUE constraint${name ? ` ${name[1] ?? name[2] ?? name[3]}` : ""} refused the second one, as it should, and nobody expected that: INSERT INTO ${table} … ON CONFLICT DO NOTHING, or DO UPDATE (elsewhere ON DUPLICATE KEY UPDATE), and look whether a row was written; or catch the error, and read what the other one wrote.`;
}

/** Without a transaction a lock ends with its statement. */
function outside(locks: readonly Guard[], all: readonly (Span | undefined)[]): string | undefined {
  const found = locks.find(({ at, local }) => local && (all[at]?.implied ?? true));
  if (!found) return undefined;
  const what = found.table === undefined ? `${found.called}(${found.name})` : `FOR UPDATE on ${found.table}`;
  const instead =
    found.table === undefined
      ? "hf.transaction({ lock: key(…) }, …)"
      : `hf.transaction((tx) => tx.rows("${found.table}", [id]) …)`;
  return `${what} stands outside of a transaction: its lock is gone as soon as the statement has ended. BEGIN before it, COMMIT after the write, all of it on one connection: ${instead}.`;
}

/** Locked, read, let go, and only then written. */
function tooEarly(
  choices: readonly Choice[],
  locks: readonly Guard[],
  conflicts: readonly Conflict[],
): string | undefined {
  for (const { read, acts } of conflicts) {
    const lock = locks.find(
      ({ actor, at, until }) => actor === read.actor && at <= read.at && read.at < until,
    );
    const act = lock && acts.find(({ at }) => at > lock.until);
    if (!act) continue;
    const end = /^\s*(\w+)/.exec(choices[lock.until]?.step.text ?? "")?.[1]?.toUpperCase() ?? "COMMIT";
    if (/\bskip locked\b/i.test(lock.text))
      return `The row was claimed (step ${lock.at + 1}) and let go by ${end} (step ${lock.until + 1}) before it was marked as taken (step ${act.at + 1}): between both, the next one claims it too. Mark it in the same transaction: UPDATE ${act.table} SET … WHERE id = (SELECT … FOR UPDATE SKIP LOCKED) RETURNING …, then COMMIT; or use queue(hf, …).`;
    return `The lock (step ${lock.at + 1}) was given back by ${end === "SELECT" ? "the unlock" : end} (step ${lock.until + 1}) before ${act.table} was written (step ${act.at + 1}): write first, COMMIT after it.`;
  }
  return undefined;
}

/** What a statement sees is what was there when it began, and not when it got the lock. */
function sameStatement(
  choices: readonly Choice[],
  locks: readonly Guard[],
  conflicts: readonly Conflict[],
): string | undefined {
  for (const { read } of conflicts) {
    const lock = locks.find(({ at, table }) => at === read.at && table !== read.table);
    if (!lock || choices[read.at]?.step.waitedFor.size === 0) continue;
    return `The lock and the reading of ${read.table} are one statement (step ${read.at + 1}): what it sees is from before it waited for the lock. Take the lock in a statement of its own, before the one that reads: hf.transaction({ lock: key(…) }, …) does.`;
  }
  return undefined;
}

function otherKeys(locks: readonly Guard[], conflicts: readonly Conflict[]): string | undefined {
  for (const { read, write } of conflicts) {
    const of = (actor: number) => locks.filter((lock) => lock.actor === actor && lock.name !== undefined);
    const [own, others] = [of(read.actor), of(write.actor)];
    const [mine, other] = [own[0], others[0]];
    if (!mine || !other || own.some(({ name }) => others.some((each) => each.name === name))) continue;
    return `Both lock something, but not the same: ${mine.called}(${mine.name}) and ${other.called}(${other.name}) do not exclude each other. Lock what both of them check, under one key: hf.transaction({ lock: key("${read.table}", …) }, …).`;
  }
  return undefined;
}

/** `UPDATE … WHERE id = (SELECT … LIMIT 1)`: both find the same row. */
function samePick(choices: readonly Choice[], conflicts: readonly Conflict[]): string | undefined {
  for (const { read, acts } of conflicts) {
    const text = choices[read.at]?.step.text ?? "";
    const act = acts.find(({ at, table }) => at === read.at && table === read.table);
    if (!act || act.kind !== "write" || !/\(\s*select\b[^]*\blimit\b/i.test(text)) continue;
    return `Both pick the same row of ${read.table}, and the second one writes it after the first: a statement by itself is no lock. Lock what is picked: WHERE id = (SELECT … FOR UPDATE SKIP LOCKED LIMIT 1).`;
  }
  return undefined;
}
