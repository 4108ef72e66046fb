/** Sessions of this database, and their transactions. */
import { type MysqlPatient, needsProcess } from "./patient.ts";

export interface Session {
  readonly id: string;
  readonly user: string;
  /** Between two statements. */
  readonly idle: boolean;
  readonly state: string;
  /** Since when it is so; MySQL counts from the beginning of the last statement. */
  readonly seconds: number;
  /** What it runs, without values. */
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
    query: patient.server.hf.redacted(String(row["query"])),
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
        // MariaDB gives those that have only read no number, but an address: "(0xffff7191ad00)".
        const [, id, seconds] = /^\(?(\w+)\)?, ACTIVE (?:\(PREPARED\) )?(\d+) sec/.exec(text) ?? [];
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
