/** What is written down of the commands that run under locks: for those who follow them, and for whoever finds the lock held. */
import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import type { Key } from "holdfast";
import type { Row, Server } from "../server.ts";
import { withoutPasswords } from "../text.ts";
import { fit } from "../terminal.ts";
import { isDenied } from "../user.ts";

/** A command that runs, or ran, under a lock. */
export interface ExecRun {
  readonly id: string;
  /** The name of the lock. */
  readonly lock: string;
  /** The session that has the lock, or the holder of the lease, as `holdfast locks` shows it. Empty: not known. */
  readonly session: string;
  readonly host: string;
  readonly process: number;
  readonly command: string;
  /** Milliseconds since it began, by the database's clock. */
  readonly ageMs: number;
  /** Undefined: it runs, or its holdfast was killed. */
  readonly code: number | undefined;
}

/** One that this process runs. */
export interface OwnRun {
  ended(code: number): Promise<void>;
}

const longest = 200;

const secret = "(?:pass(?:word|wd|phrase)?|pwd|secret|token|credentials?|(?:api|access|private)[-_]?key)";
/** "--password", whose value is the next word, and "--password=…", whose value is the rest. */
const option = new RegExp(`^([-\\w]*${secret}[-\\w]*)(=|:|$)`, "i");
/** "token=abc", "PGPASSWORD='open sesame'", in a script or a JSON document that is one word. */
const inside = new RegExp(`(${secret}\\w*["']?(?:\\s*[=:]\\s*|\\s+))("[^"]*"|'[^']*'|\\S+)`, "gi");
/** "Authorization: Bearer abc": the rest of it, whatever the scheme. */
const header = /((?:authorization|cookie)\s*[:=]).*/is;
/** Options of programs that are known to take one. */
const known =
  /((?:mysql|mariadb)[\w-]*\s(?:.*\s)?-p(?=\S)|sshpass\s+-p\s*|redis-cli\s(?:.*\s)?-a\s+|curl\s(?:.*\s)?(?:-u|--user)\s*[^\s:]+:)\S+/gs;

/** As it is shown to others: without what looks like a secret. */
export function commandText(words: readonly string[]): string {
  const text = words.map((each, i) => {
    const [, , after] = option.exec((i > 1 && words[i - 1]) || "") ?? [];
    if (after === "" || after === ":") return "…";
    const [own, , sign] = option.exec(each) ?? [];
    if (own !== undefined && sign !== "") return `${own}…`;
    return withoutPasswords(each).replace(header, "$1 …").replaceAll(inside, "$1…");
  });
  return fit(text.join(" ").replaceAll(known, "$1…").replaceAll(/\s+/g, " "), longest);
}

const now: Readonly<Record<Server["kind"], string>> = {
  postgres: "(extract(epoch FROM clock_timestamp()) * 1000)::bigint",
  mysql: "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)",
  mariadb: "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)",
  sqlite: "CAST(unixepoch('subsec') * 1000 AS INTEGER)",
};

/** No such table (or no schema): of PostgreSQL, of MySQL and MariaDB, of SQLite. */
function isMissing(error: unknown): boolean {
  const { code, errno, message } = error as { code?: unknown; errno?: unknown; message?: unknown };
  return (
    code === "42P01" || code === "3F000" || errno === 1146 || String(message).startsWith("no such table")
  );
}

/** Values are written as ?. */
async function ask({ kind, query }: Server, text: string, values: readonly unknown[]): Promise<Row[]> {
  let n = 0;
  return query(kind === "postgres" ? text.replaceAll("?", () => `$${++n}`) : text, values);
}

/** Undefined: it cannot be written down here, since the table is missing, or not for this user. */
export async function beginRun(
  server: Server,
  keys: readonly Key[],
  {
    command,
    session,
    alone,
  }: { readonly command: string; readonly session: string; readonly alone: boolean },
): Promise<OwnRun | undefined> {
  const table = server.own("exec_run");
  const id = randomUUID();
  try {
    for (const key of keys) {
      // Who has the lock for itself knows that all others have ended.
      if (alone) await ask(server, `DELETE FROM ${table} WHERE lock_id = ?`, [key.id]);
      await ask(
        server,
        `INSERT INTO ${table} (lock_id, id, name, session, host, process, command, started) VALUES (?, ?, ?, ?, ?, ?, ?, ${now[server.kind]})`,
        [key.id, id, fit(key.name, longest), session, fit(hostname(), longest), process.pid, command],
      );
    }
  } catch (error) {
    if (isMissing(error) || isDenied(error)) return undefined;
    throw error;
  }
  // Nobody follows these any more.
  await ask(server, `DELETE FROM ${table} WHERE ended < ${now[server.kind]} - 86400000`, []).catch(() => {});
  return {
    async ended(code) {
      await ask(server, `UPDATE ${table} SET ended = ${now[server.kind]}, code = ? WHERE id = ?`, [code, id]);
    },
  };
}

async function runsWhere(
  server: Server,
  where: string,
  values: readonly unknown[],
): Promise<ExecRun[] | undefined> {
  try {
    const rows = await ask(
      server,
      `SELECT id AS id, name AS name, session AS session, host AS host, process AS process, command AS command,
        ${now[server.kind]} - started AS age, code AS code FROM ${server.own("exec_run")} WHERE ${where} ORDER BY started`,
      values,
    );
    return rows.map((row) => ({
      id: String(row["id"]),
      lock: String(row["name"]),
      session: String(row["session"]),
      host: String(row["host"]),
      process: Number(row["process"]),
      command: String(row["command"]),
      ageMs: Math.max(0, Number(row["age"])),
      code: row["code"] === null ? undefined : Number(row["code"]),
    }));
  } catch (error) {
    if (isMissing(error) || isDenied(error)) return undefined;
    throw error;
  }
}

/** The last run under one of these keys, or several that shared it. Undefined: it is not known here. */
export function runsOf(server: Server, keys: readonly Key[]): Promise<ExecRun[] | undefined> {
  return runsWhere(
    server,
    `lock_id IN (${keys.map(() => "?").join(", ")})`,
    keys.map(({ id }) => id),
  );
}

/** Those that have not said that they have ended. */
export async function unended(server: Server): Promise<readonly ExecRun[]> {
  return (await runsWhere(server, "ended IS NULL", []).catch(() => undefined)) ?? [];
}

/** "`npm run migrate` on web-1 (process 88)". */
export function described({ command, host, process: pid }: ExecRun): string {
  return `\`${command}\` on ${host} (process ${pid})`;
}
