/** What a failed schedule shows beyond its kind: a protection that was meant, and why it did not hold. */
import type { Isolation } from "../../seam/database.ts";
import { lockCalls } from "../../seam/lock-calls.ts";
import type { Choice, ExploreRun } from "./schedule.ts";
import { asWritten, bare, footprint, lockedTable, locksRows } from "./statement.ts";

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
  const texts = choices.map(({ step }) => step.text);
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
    const locked = lockedTable(text);
    const rows =
      locksRows(text) && footprint(text).kind === "read"
        ? [
            {
              actor: chosen,
              at,
              until,
              text,
              local: true,
              called: /\bfor (?:no key )?update\b/i.test(text) ? "FOR UPDATE" : "FOR SHARE",
              name: undefined,
              table: locked === undefined ? undefined : asWritten(texts, locked),
            },
          ]
        : [];
    return [...named, ...rows];
  });
}

const shown = ({ table, called, name }: Guard): string =>
  table === undefined ? `${called}(${name})` : `${called} on ${table}`;

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

/** How old what a transaction sees may be. */
interface Snapshots {
  readonly isolation: Isolation | undefined;
  /** It is from the first statement that reads without a lock, at REPEATABLE READ unless something else is asked for. */
  readonly lateSnapshot: boolean;
}

/** Why what was meant to protect did not; undefined: nothing of the kind is seen. */
export function evidence(
  run: ExploreRun,
  conflicts: readonly Conflict[],
  accesses: readonly Access[],
  snapshots: Snapshots,
): string | undefined {
  const { choices } = run;
  const all = spans(choices);
  const locks = guards(choices, all);
  return (
    otherConnection(choices) ??
    refused(run) ??
    outside(choices, locks, all) ??
    tooEarly(choices, locks, conflicts) ??
    beforeCommit(choices, locks, all, conflicts) ??
    sameStatement(choices, locks, conflicts) ??
    tooLate(choices, locks, conflicts) ??
    oldSnapshot(choices, locks, all, accesses, snapshots) ??
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
  const [written = ""] = footprint(found.step.text).writes;
  const table = asWritten([found.step.text], written);
  return `The UNIQUE constraint${name ? ` ${name[1] ?? name[2] ?? name[3]}` : ""} refused the second one, as it should, and nobody expected that: INSERT INTO ${table} … ON CONFLICT DO NOTHING, or DO UPDATE (elsewhere ON DUPLICATE KEY UPDATE), and look whether a row was written; or catch the error, and read what the other one wrote.`;
}

/** Without a transaction a lock ends with its statement. */
function outside(
  choices: readonly Choice[],
  locks: readonly Guard[],
  all: readonly (Span | undefined)[],
): string | undefined {
  const found = locks.find(({ at, local }) => local && (all[at]?.implied ?? true));
  if (!found) return undefined;
  const what = shown(found);
  const around = all.find(
    (span) =>
      span &&
      !span.implied &&
      span.from < found.at &&
      found.at < span.to &&
      choices[span.from]?.chosen === found.actor,
  );
  if (around)
    return `${what} (step ${found.at + 1}) was sent through a pool, over another connection than the transaction that began in step ${around.from + 1}: its lock is gone as soon as the statement has ended. Send it over the transaction's own connection, after BEGIN and before what is read.`;
  const instead =
    found.table === undefined
      ? "hf.transaction({ lock: key(…) }, …)"
      : `hf.transaction((tx) => tx.rows("${bare(found.table)}", [id]) …)`;
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

/** Given back before others can see what was written under it. */
function beforeCommit(
  choices: readonly Choice[],
  locks: readonly Guard[],
  all: readonly (Span | undefined)[],
  conflicts: readonly Conflict[],
): string | undefined {
  for (const { read, write } of conflicts) {
    const end = all[write.at]?.to ?? write.at;
    const lock = locks.find(
      ({ actor, at, until, local }) =>
        !local &&
        actor === write.actor &&
        at <= write.at &&
        write.at < until &&
        until < end &&
        until < read.at,
    );
    if (!lock || !choices[end]) continue;
    return `${shown(lock)} (step ${lock.at + 1}) was given back (step ${lock.until + 1}) before COMMIT (step ${end + 1}): until then others do not see what was written to ${write.table}. Give it back after COMMIT, or let it end with the transaction: hf.transaction({ lock: key(…) }, …).`;
  }
  return undefined;
}

/** Read first, and then locked. */
function tooLate(
  choices: readonly Choice[],
  locks: readonly Guard[],
  conflicts: readonly Conflict[],
): string | undefined {
  for (const { read, acts } of conflicts) {
    const lock = locks.find(
      ({ actor, at, table }) =>
        actor === read.actor &&
        at > read.at &&
        acts.some((act) => act.at >= at) &&
        (table === undefined || table === read.table),
    );
    if (!lock || footprint(choices[read.at]?.step.text ?? "").kind !== "read") continue;
    // What it reads under the lock is what it should go by.
    return `${shown(lock)} (step ${lock.at + 1}) was taken after ${read.table} had been read (step ${read.at + 1}): others could write in between. Take the lock first, then read${lock.table === undefined ? "" : ", or decide by what the locking statement returns"}.`;
  }
  return undefined;
}

const oneSnapshot = /\bisolation level (?:repeatable read|serializable)\b/i;

/** One snapshot for the whole transaction: what is read after the lock is from before it. */
function oldSnapshot(
  choices: readonly Choice[],
  locks: readonly Guard[],
  all: readonly (Span | undefined)[],
  accesses: readonly Access[],
  { isolation, lateSnapshot }: Snapshots,
): string | undefined {
  for (const lock of locks) {
    const span = all[lock.at];
    const of = (at: number) => all[at] !== undefined && all[at] === span;
    const own = choices.flatMap(({ step }, at) => (of(at) ? [{ at, text: step.text }] : []));
    const texts = own.map(({ text }) => text);
    const asked =
      texts.some((text) => oneSnapshot.test(text)) ||
      isolation === "repeatable read" ||
      isolation === "serializable" ||
      (lateSnapshot &&
        !isolation &&
        !choices.some(({ step }) => /\bread (?:un)?committed\b/i.test(step.text)));
    // The lock itself, where that is a query.
    const first = own.find(({ text }) => {
      const { kind, reads } = footprint(text);
      return lateSnapshot
        ? kind === "read" && reads.size > 0 && !locksRows(text)
        : !/^\s*(?:begin|start|set)\b/i.test(text);
    });
    if (!span || span.implied || !asked || !first || first.at > lock.at) continue;
    const read = accesses.find(({ at, actor, kind, table }) => {
      if (kind !== "read" || actor !== lock.actor || at <= lock.at || !of(at)) return false;
      return accesses.some((write) => {
        const end = all[write.at]?.to ?? write.at;
        return (
          write.kind !== "read" &&
          write.actor !== actor &&
          write.table === table &&
          first.at < end &&
          end < at
        );
      });
    });
    if (!read || locksRows(choices[read.at]?.step.text ?? "")) continue;
    return `${shown(lock)} (step ${lock.at + 1}) was held, but the transaction reads ${read.table} (step ${read.at + 1}) as it was in step ${first.at + 1}, before it had the lock: at REPEATABLE READ and SERIALIZABLE all of it sees one snapshot. Use READ COMMITTED, or take the lock before BEGIN: hf.transaction({ lock: key(…) }, …).`;
  }
  return undefined;
}

/** Why they waited for each other; undefined: they want different things in different orders. */
export function deadlockOf({
  choices,
}: ExploreRun): { readonly table: string; readonly fix: string } | undefined {
  const texts = choices.map(({ step }) => step.text);
  const by = (table: string) =>
    choices.filter(({ step }) => [...footprint(step.text).writes].includes(table));
  const actors = (some: readonly Choice[]) => new Set(some.map(({ chosen }) => chosen)).size;
  for (const plain of new Set(texts.flatMap((text) => [...footprint(text).writes]))) {
    const table = asWritten(texts, plain);
    const all = by(plain);
    const shares = all.filter(({ step: { text } }) =>
      /\bfor (?:key )?share\b|\block in share mode\b/i.test(text),
    );
    if (actors(shares) > 1 && all.some(({ step: { text } }) => footprint(text).kind === "write"))
      return {
        table,
        fix: `Both share a row of ${table} (FOR SHARE), and then each wants to write it, and waits until the other shares it no more. Lock it alone as it is read: FOR UPDATE, or tx.rows("${bare(table)}", [id]).`,
      };
    const missing = all.filter(
      ({ step: { text, rows } }) => locksRows(text) && footprint(text).kind === "read" && rows.length === 0,
    );
    if (actors(missing) > 1 && all.some(({ step: { text } }) => footprint(text).kind === "insert"))
      return {
        table,
        fix: `Both locked a row of ${table} that is not there: what they have is the gap, which does not keep the other one out of it, and then each INSERT waits for the other's gap. INSERT first (ON DUPLICATE KEY UPDATE), and look at what it did; or take a lock by name: hf.transaction({ lock: key("${bare(table)}", id) }, …).`,
      };
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
    return `Both lock something, but not the same: ${mine.called}(${mine.name}) and ${other.called}(${other.name}) do not exclude each other. Lock what both of them check, under one key: hf.transaction({ lock: key("${bare(read.table)}", …) }, …).`;
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
