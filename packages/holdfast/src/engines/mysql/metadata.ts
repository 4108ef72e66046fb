/**
 * Who waits for a table itself, as ALTER does until the last transaction that has used the table is over, and as
 * everybody does who comes after it. These locks (metadata locks) are the server's, and InnoDB knows nothing of them.
 */
import type { Row, SqlConnection } from "../../seam/database.ts";
import { sql } from "../../seam/sql.ts";

/** A lock of a table, or of something larger, that is held or waited for. */
export interface TableLock {
  readonly id: string;
  readonly name: string;
  readonly mode: string;
  readonly granted: boolean;
  readonly since: number | undefined;
  readonly waitingMs: number | undefined;
  readonly blockedBy: readonly string[];
}

/** What a kind of lock has to wait for: locks that others have, and those that others wait for, who go first. */
const conflicts: Readonly<Record<string, readonly [held: string, awaited: string]>> = {
  SHARED: ["X", "X"],
  SHARED_HIGH_PRIO: ["X", ""],
  SHARED_READ: ["SNRW X", "SNRW X"],
  SHARED_WRITE: ["SRO SNW SNRW X", "SNW SNRW X"],
  SHARED_WRITE_LOW_PRIO: ["SRO SNW SNRW X", "SRO SNW SNRW X"],
  SHARED_UPGRADABLE: ["SU SNW SNRW X", "X"],
  SHARED_READ_ONLY: ["SW SWLP SNRW X", "SW SNRW X"],
  SHARED_NO_WRITE: ["SW SWLP SU SNW SNRW X", "X"],
  SHARED_NO_READ_WRITE: ["SR SW SWLP SU SRO SNW SNRW X", "X"],
  EXCLUSIVE: ["S SH SR SW SWLP SU SRO SNW SNRW X", ""],
};

const shorts: Readonly<Record<string, string>> = {
  SHARED: "S",
  SHARED_HIGH_PRIO: "SH",
  SHARED_READ: "SR",
  SHARED_WRITE: "SW",
  SHARED_WRITE_LOW_PRIO: "SWLP",
  SHARED_UPGRADABLE: "SU",
  SHARED_READ_ONLY: "SRO",
  SHARED_NO_WRITE: "SNW",
  SHARED_NO_READ_WRITE: "SNRW",
  EXCLUSIVE: "X",
};

const wide = "INTENTION_EXCLUSIVE";

/** Of the whole server, or a whole schema: many who write a part of it (IX) get along, and so do many who want it still (S). */
function collide(wanted: string, other: string, granted: boolean): boolean {
  if (wanted === wide || other === wide) return wanted !== other;
  const [held = "", awaited = ""] = conflicts[wanted] ?? [];
  return (granted ? held : awaited).split(" ").includes(shorts[other] ?? other);
}

interface Known {
  readonly id: string;
  /** What is locked. */
  readonly object: string;
  readonly name: string;
  readonly mode: string;
  readonly granted: boolean;
  readonly since: number | undefined;
  readonly waitingMs: number | undefined;
}

/** Waits with who is in the way; and of what is held, that which is in somebody's. */
function related(known: readonly Known[]): TableLock[] {
  const waits = known
    .filter(({ granted }) => !granted)
    .map((wait) => {
      const others = known.filter(({ object, id }) => object === wait.object && id !== wait.id);
      const inTheWay = (granted: boolean) =>
        others.filter((other) => other.granted === granted && collide(wait.mode, other.mode, granted));
      const held = inTheWay(true);
      return { wait, blockers: held.length > 0 ? held : inTheWay(false) };
    });
  const holders = new Set(waits.flatMap(({ blockers }) => blockers).filter(({ granted }) => granted));
  return [
    ...[...holders].map((lock) => ({ ...lock, blockedBy: [] })),
    ...waits.map(({ wait, blockers }) => ({
      ...wait,
      blockedBy: [...new Set(blockers.map(({ id }) => id))],
    })),
  ];
}

/** All locks of what somebody waits for. Those of GET_LOCK are told elsewhere. */
const instrumented =
  sql.raw(`SELECT t.processlist_id AS id, m.object_type AS type, m.object_schema AS db, m.object_name AS name,
    m.lock_type AS mode, m.lock_status AS status,
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1000 - x.timer_wait / 1e9 AS since,
    s.timer_wait / 1e9 AS waiting
  FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.thread_id = m.owner_thread_id
  LEFT JOIN performance_schema.events_transactions_current x ON x.thread_id = t.thread_id AND x.state = 'ACTIVE'
  LEFT JOIN performance_schema.events_statements_current s ON s.thread_id = t.thread_id AND s.nesting_event_level = 0 AND s.end_event_id IS NULL
  WHERE m.object_type <> 'USER LEVEL LOCK' AND m.lock_status IN ('GRANTED', 'PENDING') AND t.processlist_id <> CONNECTION_ID()
    AND (m.object_schema = DATABASE() OR m.object_schema IS NULL)
    AND EXISTS (SELECT 1 FROM performance_schema.metadata_locks p WHERE p.lock_status = 'PENDING' AND p.object_type = m.object_type
      AND p.object_schema <=> m.object_schema AND p.object_name <=> m.object_name)`);

/** Where performance_schema is on. */
export async function fromMetadataLocks(connection: SqlConnection): Promise<TableLock[]> {
  const { rows } = await connection.query(instrumented);
  return related(
    rows.map((row): Known => {
      const granted = row.status === "GRANTED";
      const [type, db, name] = [row.type, row.db, row.name].map((part) => String(part ?? ""));
      return {
        id: String(row.id),
        object: JSON.stringify([type, db, name]),
        name: named(String(type), String(name || db)),
        mode: String(row.mode),
        granted,
        since: row.since === null ? undefined : Number(row.since),
        waitingMs: granted || row.waiting === null ? undefined : Number(row.waiting),
      };
    }),
  );
}

/** A table by its name alone; whatever is larger with what it is. */
function named(type: string, name: string): string {
  return type === "TABLE" ? name : `${type.toLowerCase()} ${name}`.trim();
}

/** "Waiting for table metadata lock", "Waiting for backup lock", "Waiting for table flush". */
export const tableWait = /^Waiting for .*(?:lock|flush)$/;

const plugin = sql.raw(
  "SELECT 1 AS there FROM information_schema.plugins WHERE plugin_name = 'METADATA_LOCK_INFO' AND plugin_status = 'ACTIVE'",
);
const granted = sql.raw(
  "SELECT thread_id AS id, lock_mode AS mode, table_name AS name FROM information_schema.metadata_lock_info WHERE table_schema = DATABASE() AND table_name <> ''",
);

const reads = /^(?:\s|\/\*.*?\*\/|\()*(?:SELECT|WITH|VALUES|SHOW|HANDLER)\b/is;
const writes = /^(?:\s|\/\*.*?\*\/)*(?:INSERT|UPDATE|DELETE|REPLACE|CALL|EXECUTE|DO|SET|LOAD)\b/is;

/** What a statement that is not done yet wants, by its first word: whatever is neither of these changes the table. */
function wanted(statement: string): string {
  return reads.test(statement) ? "SHARED_READ" : writes.test(statement) ? "SHARED_WRITE" : "EXCLUSIVE";
}

const ofTable = /\bTABLES?\s+(?:IF\s+(?:NOT\s+)?EXISTS\s+)?(`[^`]+`|[\w$]+)(?:\.(`[^`]+`|[\w$]+))?/i;
const ofIndex = /\bINDEX\b.*?\bON\s+(`[^`]+`|[\w$]+)(?:\.(`[^`]+`|[\w$]+))?/is;

/** The table that it changes. */
function target(statement: string): string | undefined {
  const [, first, second] = ofTable.exec(statement) ?? ofIndex.exec(statement) ?? [];
  return (second ?? first)?.replaceAll("`", "");
}

function mentions(statement: string, table: string): boolean {
  const name = table.replaceAll(/[^\w]/g, "\\$&");
  return new RegExp(`(?<![\\w$])${name}(?![\\w$])`, "i").test(statement);
}

/**
 * MariaDB tells of a wait that there is one, and with a plugin of its own (metadata_lock_info) which tables everybody
 * has, but not what is waited for: that is in the statement. Without the plugin it is known only that who reads or writes
 * waits for who changes the table that the statement names, and who of those `inside` has locked rows of it.
 */
export async function fromProcesses(
  connection: SqlConnection,
  processes: readonly Row[],
  inside: readonly { readonly id: string; readonly table: string }[],
): Promise<TableLock[]> {
  const waiting = processes.filter(({ state }) => tableWait.test(String(state)));
  if (waiting.length === 0) return [];
  const there = (await connection.query(plugin)).rows.length > 0;
  const locks = there
    ? (await connection.query(granted)).rows
    : inside.map(({ id, table }): Row => ({ id, name: table, mode: "SHARED_WRITE" }));
  const held = locks.map((row): Known => ({
    id: String(row.id),
    object: String(row.name),
    name: String(row.name),
    mode: String(row.mode).replace(/^MDL_/, ""),
    granted: true,
    since: undefined,
    waitingMs: undefined,
  }));
  const statementOf = ({ info }: Row) => String(info ?? "");
  const changed = waiting
    .map(statementOf)
    .filter((statement) => wanted(statement) === "EXCLUSIVE")
    .flatMap((statement) => target(statement) ?? []);
  const tables = [...new Set([...changed, ...held.map(({ name }) => name)])];
  const waits = waiting.map((row): Known => {
    const [id, statement] = [String(row.id), statementOf(row)];
    const table = tables.find((name) => mentions(statement, name));
    return {
      id,
      object: table ?? `of ${id}`,
      name: table ?? "a table",
      mode: wanted(statement),
      granted: false,
      since: undefined,
      waitingMs: Number(row.waited),
    };
  });
  return related([...held, ...waits]);
}
