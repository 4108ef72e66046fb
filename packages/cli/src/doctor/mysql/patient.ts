import type { Row, Server } from "../../server.ts";
import { within } from "../../within.ts";
import { answerMs, checkMs, lazy, lockMs, sessionWithin, statementMs } from "../bounded.ts";
import { CouldNotLook, type Finding, blind, noConnection } from "../check.ts";
import type { Patient } from "../patient.ts";

export interface MysqlPatient extends Patient {
  readonly maria: boolean;
  /** 'app'@'%', as the server matched it. */
  readonly user: string;
  readonly database: string;
  /** As VERSION() says it. */
  readonly full: string;
  /** As a new session gets them; names that this server does not have are not in it. */
  readonly settings: () => Promise<ReadonlyMap<string, string>>;
  readonly status: () => Promise<ReadonlyMap<string, string>>;
  /** PROCESS: what sessions of others do, and InnoDB's own tables. */
  readonly process: () => Promise<boolean>;
}

const unlimited = "SESSION sql_select_limit = 18446744073709551615, SESSION sql_big_selects = 1";

/** They belong to a connection of the command's, which ends with it. */
const bounds = (maria: boolean): string =>
  `SET SESSION ${maria ? `max_statement_time = ${statementMs / 1000}` : `max_execution_time = ${statementMs}`}, SESSION lock_wait_timeout = ${lockMs / 1000}, ${unlimited}`;

const pairs = (rows: readonly Row[]): ReadonlyMap<string, string> =>
  new Map(rows.map((row) => [String(row["variable_name"]).toLowerCase(), String(row["value"])]));

async function settingsOf(server: Server): Promise<ReadonlyMap<string, string>> {
  await using session = await server.borrow();
  const [row] = await session.query(
    "SELECT CAST(@@SESSION.sql_select_limit AS CHAR) AS most, @@SESSION.sql_big_selects AS big",
  );
  const { most = 0, big } = row ? lowered(row) : {};
  // They cut this list, too, or refuse it.
  await session.query(`SET ${unlimited}`);
  const found = pairs((await session.query("SHOW SESSION VARIABLES")).map(lowered));
  return new Map(found)
    .set("sql_select_limit", String(most))
    .set("sql_big_selects", Number(big) === 0 ? "OFF" : "ON");
}

export async function mysqlPatient(server: Server): Promise<MysqlPatient> {
  const maria = server.kind === "mariadb";
  // Before our bounds, which are settings too. A second connection would show them later, but a full server may have none.
  const settings = await within(checkMs, settingsOf(server));
  // On the one connection that locks are looked at with too.
  const look: Patient["look"] = async (text, values = []) => {
    await using session = await server.borrow();
    try {
      await session.query(bounds(maria));
      return (await session.query(text, values)).map(lowered);
    } catch (error) {
      // Lost, or dropped: nobody is to get it again. What the server has refused has a number.
      if ((error as { sqlState?: unknown }).sqlState === undefined) session.destroy();
      throw error;
    }
  };
  const [row] = await look(
    "SELECT VERSION() AS version, CURRENT_USER() AS user, DATABASE() AS db, @@version_comment AS comment",
  );
  const full = String(row?.["version"]);
  const [user = "", host = "%"] = String(row?.["user"]).split(/@(?=[^@]*$)/);
  return {
    server,
    maria,
    full: `${full} ${String(row?.["comment"])}`,
    title: `${maria ? "MariaDB" : "MySQL"} ${full.replace(/-mariadb.*$/i, "")}`,
    version: full,
    user: `${literal(user)}@${literal(host)}`,
    database: String(row?.["db"] ?? ""),
    look,
    session: () => sessionWithin(server),
    settings: () => Promise.resolve(settings),
    status: lazy(async () => pairs(await look("SHOW GLOBAL STATUS"))),
    process: lazy(async () => {
      const grants = await look("SHOW GRANTS");
      return grants.some((grant) =>
        /\b(?:ALL PRIVILEGES|PROCESS)\b.* ON \*\.\*/.test(String(Object.values(grant)[0])),
      );
    }),
    hindrance: (error) => hindrance(error, `${literal(user)}@${literal(host)}`, String(row?.["db"] ?? "")),
    async renew() {
      await server.reset();
      await within(answerMs, look("SELECT 1"));
    },
  };
}

/** MySQL says TABLE_NAME where MariaDB says table_name. */
const lowered = (row: Row): Row =>
  Object.fromEntries(Object.entries(row).map(([column, value]) => [column.toLowerCase(), value]));

export async function needsProcess(patient: MysqlPatient): Promise<void> {
  if (!(await patient.process()))
    throw new CouldNotLook(
      "sessions of other users are hidden; it needs PROCESS",
      `GRANT PROCESS ON *.* TO ${patient.user};`,
    );
}

function hindrance(error: unknown, user: string, database: string): Finding | undefined {
  const full = noConnection(error);
  if (full) return full;
  const { errno, message } = error as { errno?: unknown; message?: unknown };
  const said = String(message);
  switch (errno) {
    case 1142:
    case 1143:
    case 1044:
      return blind(
        `${said}; it needs SELECT there`,
        /holdfast_/.test(said)
          ? `GRANT SELECT ON ${name(database)}.* TO ${user};`
          : `GRANT SELECT ON performance_schema.* TO ${user};`,
      );
    case 1227: {
      // "Access denied; you need (at least one of) the SUPER, REPLICATION CLIENT privilege(s) for this operation"
      const [, rights = "PROCESS"] = /one of\) the (.+?) privilege/.exec(said) ?? [];
      const right = rights.split(", ").findLast((each) => each !== "SUPER") ?? "PROCESS";
      return blind(`it needs ${right}`, `GRANT ${right} ON *.* TO ${user};`);
    }
    case 1401:
      // "XAER_RMERR: Fatal error occurred in the transaction branch", which it is not.
      return blind("it needs XA_RECOVER_ADMIN", `GRANT XA_RECOVER_ADMIN ON *.* TO ${user};`);
    case 3024:
    case 1969:
      return blind(
        `the server took longer than ${statementMs / 1000} s`,
        "Try again when it has less to do.",
      );
    case 1205:
      return blind(`something has been locked for more than ${lockMs / 1000} s`, "Try again later.");
    default:
      return undefined;
  }
}

/** An identifier, quoted. */
export const name = (text: string): string => `\`${text.replaceAll("`", "``")}\``;

export const literal = (text: string): string => `'${text.replaceAll("\\", "\\\\").replaceAll("'", "''")}'`;
