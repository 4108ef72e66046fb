/** What kind of race a schedule shows, by what its statements read and wrote. */
import type { Run } from "./schedule.ts";

export type Anomaly = "deadlock" | "lost update" | "write skew" | "double effect" | "race";

interface Access {
  readonly actor: number;
  readonly kind: "read" | "write" | "insert";
  readonly table: string;
}

const patterns: readonly (readonly [RegExp, Access["kind"]])[] = [
  [/\bINSERT\s+INTO\s+([\w".]+)/gi, "insert"],
  [/\bUPDATE\s+(?:ONLY\s+)?([\w".]+)\s+(?:AS\s+\w+\s+)?SET\b/gi, "write"],
  [/\bDELETE\s+FROM\s+([\w".]+)/gi, "write"],
  [/\b(?:FROM|JOIN)\s+([\w".]+)/gi, "read"],
];

function accesses({ choices }: Run): Access[] {
  return choices.flatMap(({ chosen, step }) =>
    patterns.flatMap(([pattern, kind]) =>
      [...step.text.matchAll(pattern)].map(([, table = ""]) => ({
        actor: chosen,
        kind,
        table: table.replaceAll('"', "").split(".").at(-1) ?? "",
      })),
    ),
  );
}

/** `failed`: errors of the actors. */
export function anomalyOf(run: Run): { kind: Anomaly; table?: string; fix: string } {
  if (run.choices.some(({ step }) => /deadlock/i.test(step.error ?? "")))
    return {
      kind: "deadlock",
      fix: "Lock what is locked in one call, so that everybody takes it in the same order: hf.transaction({ lock: [a, b] }, …) or tx.rows(table, [ids]); and let the transaction be retried.",
    };
  const all = accesses(run);
  const tables = [...new Set(all.map(({ table }) => table))];
  const actors = (table: string, kind: Access["kind"]) =>
    new Set(all.filter((each) => each.table === table && each.kind === kind).map(({ actor }) => actor)).size;
  for (const table of tables)
    if (actors(table, "read") > 1 && actors(table, "write") > 1)
      return {
        kind: "lost update",
        table,
        fix: `Decide in the write itself (UPDATE ${table} SET n = n - 1 WHERE … AND n >= 1), lock the row before it is read (tx.rows("${table}", [id]), FOR UPDATE), or write with a version (versioned).`,
      };
  for (const table of tables)
    if (actors(table, "read") > 1 && actors(table, "insert") > 1)
      return {
        kind: "write skew",
        table,
        fix: `Rows that are not there yet cannot be locked: take a lock for what is checked (hf.transaction({ lock: key("${table}", id) }, …)), or let a UNIQUE or EXCLUDE constraint refuse the second one.`,
      };
  for (const table of tables)
    if (actors(table, "insert") > 1)
      return {
        kind: "double effect",
        table,
        fix: `Make it happen once: a UNIQUE constraint on ${table}, or once(tx, id, …).`,
      };
  return {
    kind: "race",
    fix: "Lock what is checked before it is read: hf.transaction({ lock: key(…) }, …).",
  };
}
