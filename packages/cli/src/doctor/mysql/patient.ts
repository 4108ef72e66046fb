import type { Row, Server, Session } from "../../server.ts";
import { checkMs, lazy, lockMs, statementMs, within } from "../bounded.ts";
import { CouldNotLook, type Finding, blind } from "../check.ts";
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

/** They belong to a session of its own, which ends with the command. */
const bounds = (maria: boolean): string =>
  `SET SESSION ${maria ? `max_statement_time = ${statementMs / 1000}` : `max_execution_time = ${statementMs}`}, SESSION lock_wait_timeout = ${lockMs / 1000}`;

export async function mysqlPatient(server: Server): Promise<MysqlPatient> {
  const maria = server.kind === "mariadb";
  const open = async (): Promise<Session> => {
    const opened = await within(checkMs, server.session());
    await within(checkMs, opened.query(bounds(maria)));
    return opened;
  };
  const plain = (session: Session, text: string, values: readonly unknown[]): Promise<Row[]> =>
    session.query(text, values).then((rows) => rows.map(lowered));
  const pairs = (rows: readonly Row[]): ReadonlyMap<string, string> =>
    new Map(rows.map((row) => [String(row["variable_name"]).toLowerCase(), String(row["value"])]));
  // Of a session without our bounds, which are settings too.
  const settings = lazy(async () => {
    await using session = await server.session();
    return pairs(await plain(session, "SHOW SESSION VARIABLES", []));
  });
  let session = await open();
  const look: Patient["look"] = (text, values = []) => plain(session, text, values);
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
    session: () => server.session(),
    settings,
    status: lazy(async () => pairs(await look("SHOW GLOBAL STATUS"))),
    process: lazy(async () => {
      const grants = await look("SHOW GRANTS");
      return grants.some((grant) =>
        /\b(?:ALL PRIVILEGES|PROCESS)\b.* ON \*\.\*/.test(String(Object.values(grant)[0])),
      );
    }),
    hindrance: (error) => hindrance(error, `${literal(user)}@${literal(host)}`, String(row?.["db"] ?? "")),
    async renew() {
      const old = session;
      session = await open();
      // It may be in the middle of something that does not end: nobody waits for it.
      void Promise.resolve(old[Symbol.asyncDispose]()).catch(() => {});
    },
    [Symbol.asyncDispose]: () =>
      within(1000, Promise.resolve(session[Symbol.asyncDispose]())).catch(() => {}),
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
