/** Whom the server takes us for, and what it does not let us do. */
import type { Server } from "./server.ts";

export async function userOf({ kind, query }: Pick<Server, "kind" | "query">): Promise<string> {
  if (kind === "sqlite") return "This process";
  const text = kind === "postgres" ? "SELECT current_user AS name" : "SELECT CURRENT_USER() AS name";
  const rows = await query(text).catch(() => []);
  return String(rows[0]?.["name"] ?? "The database user");
}

/** As GRANT has to name it. */
export async function grantee(server: Server): Promise<string> {
  const name = await userOf(server);
  if (server.kind === "postgres") return `"${name.replaceAll('"', '""')}"`;
  const quoted = (part: string) => `'${part.replaceAll("\\", "\\\\").replaceAll("'", "''")}'`;
  const [user = "", host = "%"] = name.split(/@(?=[^@]*$)/);
  return `${quoted(user)}@${quoted(host)}`;
}

/** No right to a database, a table, a column, a statement, a routine. https://mariadb.com/kb/en/mariadb-error-codes/ */
const refusals = new Set([1044, 1142, 1143, 1227, 1370]);

export function isDenied(error: unknown): boolean {
  const { code, errno } = (error ?? {}) as { code?: unknown; errno?: unknown };
  return code === "HF_ACCESS_DENIED" || code === "42501" || refusals.has(Number(errno));
}
