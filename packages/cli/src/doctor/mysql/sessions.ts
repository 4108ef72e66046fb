/** Sessions of this database, their transactions, and which of them waits for which. */
import { CouldNotLook } from "../check.ts";
import { type MysqlPatient, needsProcess } from "./patient.ts";

export interface Session {
  readonly id: string;
  readonly user: string;
  /** Between two statements. */
  readonly idle: boolean;
  readonly state: string;
  /** Since when it is so; MySQL counts from the beginning of the last statement. */
  readonly seconds: number;
  readonly query: string;
  readonly transaction: Transaction | undefined;
}

export interface Transaction {
  readonly id: string;
  readonly seconds: number;
  /** How many rows it locks, and how much memory that takes. */
  readonly locked: number;
  readonly bytes: number;
  /** How many seconds it has been waiting for a row; undefined: it does not wait. */
  readonly waiting: number | undefined;
}

/**
 * All but our own. MySQL cannot read information_schema's list while any session of the server runs a statement with an
 * emoji in it.
 */
export async function sessions(patient: MysqlPatient): Promise<Session[]> {
  await needsProcess(patient);
  const { maria } = patient;
  const listed = !maria && (await patient.settings()).get("performance_schema") === "ON";
  const open = await transactions(patient);
  const rows = await patient.look(
    `SELECT id, user, command, COALESCE(state, '') AS state, time, COALESCE(info, '') AS query
FROM ${listed ? "performance_schema" : "information_schema"}.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()`,
  );
  return rows.map((row) => ({
    id: String(row["id"]),
    user: String(row["user"]),
    idle: row["command"] === "Sleep",
    state: String(row["state"]),
    seconds: Number(row["time"]),
    query: String(row["query"]),
    transaction: open.get(String(row["id"])),
  }));
}

/**
 * Those at work, by session. From the server's report: MySQL cannot read innodb_trx while any transaction runs a
 * statement with an emoji in it.
 */
async function transactions(patient: MysqlPatient): Promise<ReadonlyMap<string, Transaction>> {
  const [row] = await patient.look("SHOW ENGINE INNODB STATUS");
  return new Map(
    String(row?.["status"])
      .split(/^---TRANSACTION /m)
      .slice(1)
      .flatMap((text) => {
        const [, id, seconds] = /^(\w+), ACTIVE (?:\(PREPARED\) )?(\d+) sec/.exec(text) ?? [];
        const session = /thread id (\d+)/.exec(text)?.[1];
        if (id === undefined || session === undefined) return [];
        const [, bytes = 0, locked = 0] = /heap size (\d+), (\d+) row lock/.exec(text) ?? [];
        const [, waited, unit] = /TRX HAS BEEN WAITING (\d+) (us|SEC)/.exec(text) ?? [];
        const waiting = waited === undefined ? undefined : Number(waited) / (unit === "us" ? 1e6 : 1);
        const transaction = {
          id,
          seconds: Number(seconds),
          locked: Number(locked),
          bytes: Number(bytes),
          waiting,
        };
        return [[session, transaction] as const];
      }),
  );
}

const pairs = {
  maria: `SELECT DISTINCT r.trx_mysql_thread_id AS waiter, b.trx_mysql_thread_id AS blocker FROM information_schema.innodb_lock_waits w
JOIN information_schema.innodb_trx r ON r.trx_id = w.requesting_trx_id JOIN information_schema.innodb_trx b ON b.trx_id = w.blocking_trx_id`,
  // A lock of a row that was written bears the thread of whoever waits for it; that of its table is the owner's.
  mysql: `SELECT DISTINCT r.processlist_id AS waiter, b.processlist_id AS blocker FROM performance_schema.data_lock_waits w
JOIN performance_schema.threads r ON r.thread_id = w.requesting_thread_id
JOIN performance_schema.data_locks l ON l.engine_transaction_id = w.blocking_engine_transaction_id AND l.lock_type = 'TABLE'
JOIN performance_schema.threads b ON b.thread_id = l.thread_id`,
};

/** Pairs of sessions, of which one waits for a row of the other's. */
export async function waits(
  patient: MysqlPatient,
): Promise<readonly { readonly waiter: string; readonly blocker: string }[]> {
  const { maria } = patient;
  if (!maria && (await patient.settings()).get("performance_schema") !== "ON")
    throw new CouldNotLook(
      "who waits for whom is in performance_schema, which is OFF",
      "performance_schema = ON   # in my.cnf, under [mysqld]; needs a restart",
    );
  const rows = await patient.look(maria ? pairs.maria : pairs.mysql);
  return rows.map(({ waiter, blocker }) => ({ waiter: String(waiter), blocker: String(blocker) }));
}
