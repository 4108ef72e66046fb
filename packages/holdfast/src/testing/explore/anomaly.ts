/** What kind of race a schedule shows, by what its statements read and wrote. */
import type { Isolation } from "../../seam/database.ts";
import { type Access, type Conflict, deadlockOf, evidence, spans, wasDeadlock } from "./evidence.ts";
import { faultFix } from "./faults.ts";
import type { Choice, ExploreRun } from "./schedule.ts";
import { asWritten, bare, footprint } from "./statement.ts";

export type Anomaly =
  | "deadlock"
  | "dirty read"
  | "lost update"
  | "write skew"
  | "phantom"
  | "read skew"
  | "double effect"
  | "race"
  | "fault"
  | "not a race";

export interface Diagnosis {
  readonly kind: Anomaly;
  readonly table?: string;
  readonly fix: string;
  /** Choices whose reading was out of date when it was acted on. */
  readonly stale: ReadonlySet<number>;
}

function accesses(choices: readonly Choice[]): Access[] {
  const texts = choices.map(({ step }) => step.text);
  return choices.flatMap(({ chosen, step: { text } }, at) => {
    const { kind, reads, writes } = footprint(text);
    const where = /\bwhere\b([\s\S]*)$/i.exec(text)?.[1]?.trim() ?? "";
    const of = (what: Access["kind"], tables: Iterable<string>) =>
      [...tables].map((table) => ({
        at,
        actor: chosen,
        kind: what,
        table: asWritten(texts, table),
        where,
      }));
    return [...of("read", reads), ...(kind === "insert" || kind === "write" ? of(kind, writes) : [])];
  });
}

export interface EngineTraits {
  /** It locks everything at once, so what helps is to begin with that. */
  readonly whole?: boolean;
  /** As the protocol has it. Such servers begin transactions at REPEATABLE READ. */
  readonly lateSnapshot?: boolean;
}

export function diagnose(
  run: ExploreRun,
  isolation: Isolation | undefined,
  { whole = false, lateSnapshot = false }: EngineTraits = {},
): Diagnosis {
  const diagnosis = judge(run, isolation, lateSnapshot);
  const { kind } = diagnosis;
  if (!whole || kind === "not a race" || kind === "deadlock" || kind === "double effect" || kind === "fault")
    return diagnosis;
  return {
    ...diagnosis,
    fix: "Begin the transaction as a writer (BEGIN IMMEDIATE), so that nobody writes between what it reads and what it writes; or decide in the write itself.",
  };
}

function judge(run: ExploreRun, isolation: Isolation | undefined, lateSnapshot: boolean): Diagnosis {
  const { choices, fault } = run;
  const stale = new Set<number>();
  if (fault) return { kind: "fault", fix: faultFix(fault), stale };
  if (choices.every(({ preemptions }) => preemptions === 0) && oneAfterTheOther(choices))
    return {
      kind: "not a race",
      fix: "It fails when one runs after the other: the functions, the reset or the invariant are wrong.",
      stale,
    };
  const one = wasDeadlock(run) ? deadlockOf(run) : undefined;
  if (one) return { kind: "deadlock", ...one, stale };
  if (wasDeadlock(run))
    return {
      kind: "deadlock",
      fix: "Lock what is locked in one call, so that everybody takes it in the same order: hf.transaction({ lock: [a, b] }, …) or tx.rows(table, [ids]); and let the transaction be retried.",
      stale,
    };
  const untried = choices.some(
    ({ chosen, step }) =>
      /could not serialize/i.test(step.error ?? "") && run.results[chosen]?.status === "rejected",
  );
  if (untried)
    return {
      kind: "race",
      fix: "The server refused one of them so that nothing goes wrong, and nobody tried again: run the whole transaction again after a serialization failure, as hf.transaction does.",
      stale,
    };
  const race = raceOf(choices, isolation);
  const fix = evidence(run, race.conflicts, accesses(choices), { isolation, lateSnapshot }) ?? race.fix;
  const { kind, table } = race;
  for (const { read } of race.conflicts) stale.add(read.at);
  return { kind, ...(table === undefined ? {} : { table }), fix, stale };
}

interface Race {
  readonly kind: Anomaly;
  readonly table?: string;
  readonly fix: string;
  readonly conflicts: readonly Conflict[];
}

/** By what was read and written alone. */
function raceOf(choices: readonly Choice[], isolation: Isolation | undefined): Race {
  const all = accesses(choices);
  const transactions = spans(choices);
  const endOf = (at: number): { at: number; how: "commit" | "rollback" } => {
    const { to = at, how = "commit" } = transactions[at] ?? {};
    return { at: to, how };
  };
  // A reads, B writes what A has read, A acts on it.
  const conflicts = all.flatMap((read): Conflict[] => {
    if (read.kind !== "read") return [];
    const acts = all.filter(
      ({ at, actor, kind }) => actor === read.actor && at >= read.at && kind !== "read",
    );
    const until = Math.max(-1, ...acts.map(({ at }) => at));
    return all
      .filter(
        (write) =>
          write.kind !== "read" &&
          write.actor !== read.actor &&
          write.table === read.table &&
          endOf(write.at).at > read.at &&
          write.at < until,
      )
      .map((write) => ({ read, write, acts }));
  });
  const dirty = conflicts.find(({ read, write }) => write.at < read.at && endOf(write.at).how === "rollback");
  if (isolation === "read uncommitted" && dirty)
    return {
      kind: "dirty read",
      table: dirty.read.table,
      fix: "Read at READ COMMITTED or above: what was read here was never committed.",
      conflicts,
    };
  const same = ({ read, write, acts }: Conflict, kind: Access["kind"]) =>
    acts.find(
      (act) =>
        act.table === read.table && act.kind === kind && (kind === "insert" || act.where === write.where),
    );
  const lost = conflicts.find((each) => each.write.kind === "write" && same(each, "write"));
  if (lost) {
    const { table } = lost.read;
    return {
      kind: "lost update",
      table,
      fix: `Decide in the write itself (UPDATE ${table} SET n = n - 1 WHERE … AND n >= 1), lock the row before it is read (tx.rows("${bare(table)}", [id]), FOR UPDATE), or write with a version (versioned).`,
      conflicts,
    };
  }
  const phantom = conflicts.find(({ write }) => write.kind === "insert");
  if (phantom) {
    const { table } = phantom.read;
    const unique = mayBeUnique(choices, table)
      ? ", or let a UNIQUE or EXCLUDE constraint refuse the second one"
      : "";
    return {
      kind: "phantom",
      table,
      fix: `Rows that are not there yet cannot be locked: take a lock for what is checked (hf.transaction({ lock: key("${bare(table)}", id) }, …))${unique}.`,
      conflicts,
    };
  }
  const torn = conflicts.find(
    ({ read, write, acts }) =>
      // Who writes what it has read decides by it.
      !acts.some(({ table }) => table === read.table) &&
      all.some(
        (later) =>
          later.kind === "read" &&
          later.actor === read.actor &&
          later.at > endOf(write.at).at &&
          all.some(
            ({ kind, actor, table }) => kind !== "read" && actor === write.actor && table === later.table,
          ),
      ),
  );
  if (torn) {
    const { table } = torn.read;
    return {
      kind: "read skew",
      table,
      fix: `What was read of ${table} is from before the other's writes, what was read later from after them: read it in one statement, or in a transaction at REPEATABLE READ.`,
      conflicts,
    };
  }
  const skew = conflicts[0];
  if (skew) {
    const { table } = skew.read;
    return {
      kind: "write skew",
      table,
      fix: `What was read of ${table} must not change before it is acted on: lock it as it is read (tx.rows, FOR UPDATE or FOR SHARE), take one lock for the rule (hf.transaction({ lock: key("${bare(table)}", …) }, …)), or run both at SERIALIZABLE with retry.`,
      conflicts,
    };
  }
  const between = all.find((first) => {
    // Who only reads has nothing to lock.
    const own = all.filter(({ actor }) => actor === first.actor);
    if (own.some(({ kind }) => kind !== "read")) return false;
    return own.some((later) =>
      all.some(
        (write) =>
          write.kind !== "read" &&
          write.actor !== first.actor &&
          endOf(write.at).at > first.at &&
          endOf(write.at).at < later.at,
      ),
    );
  });
  if (between)
    return {
      kind: "read skew",
      table: between.table,
      fix: `It only reads, in several statements, and between them the other one has committed: a part of what it shows is from before that, a part from after it. Read in one statement, or in one transaction at REPEATABLE READ: hf.transaction({ isolation: "repeatable read" }, …).`,
      conflicts,
    };
  const twice = all.filter(
    ({ kind, table, actor }) =>
      kind === "insert" &&
      all.some((other) => other.kind === "insert" && other.table === table && other.actor !== actor),
  );
  const open = twice.filter(({ table }) => mayBeUnique(choices, table));
  const [first = twice[0]] = open;
  if (first) {
    // Of several tables nobody knows which row must be there once.
    const unique =
      new Set(open.map(({ table }) => table)).size === 1 ? `a UNIQUE constraint on ${first.table}, or ` : "";
    return {
      kind: "double effect",
      table: first.table,
      fix: `Make it happen once: ${unique}once(hf, id, async (tx) => …).`,
      conflicts,
    };
  }
  return {
    kind: "race",
    fix: "Lock what is checked before it is read: hf.transaction({ lock: key(…) }, …).",
    conflicts,
  };
}

function oneAfterTheOther(choices: readonly Choice[]): boolean {
  return choices.every(
    ({ chosen, step }, i) =>
      step.waitedFor.size === 0 &&
      !choices.slice(0, i).some((other, j) => other.chosen === chosen && choices[j + 1]?.chosen !== chosen),
  );
}

/** Not where there is such a constraint already, nor where what is checked is a sum. */
function mayBeUnique(choices: readonly Choice[], table: string): boolean {
  const name = bare(table).toLowerCase();
  return !choices.some(({ step: { text } }) => {
    const { kind, reads, writes } = footprint(text);
    return (
      (reads.has(name) && /\b(?:sum|avg)\s*\(/i.test(text)) ||
      (kind === "insert" &&
        writes.has(name) &&
        /\bon (?:conflict|duplicate key)\b|\binsert (?:ignore|or \w+)\b|^\s*replace\b/i.test(text))
    );
  });
}
