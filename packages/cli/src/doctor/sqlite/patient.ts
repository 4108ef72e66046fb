import { statSync } from "node:fs";
import { type Server, fileOf } from "../../server.ts";
import { blind } from "../check.ts";
import type { Patient } from "../patient.ts";

export interface SqlitePatient extends Patient {
  readonly file: string;
  /** Of the file, or of one beside it; 0 if it is not there. */
  size(suffix?: string): number;
}

export async function sqlitePatient(server: Server): Promise<SqlitePatient> {
  const [row] = await server.query("SELECT sqlite_version() AS version");
  const version = String(row?.["version"]);
  const file = fileOf(server.url);
  return {
    server,
    file,
    title: `SQLite ${version}`,
    version,
    look: (text, values = []) => server.query(text, values),
    session: () => server.session(),
    size: (suffix = "") => statSync(`${file}${suffix}`, { throwIfNoEntry: false })?.size ?? 0,
    hindrance(error) {
      // SQLITE_BUSY, SQLITE_LOCKED: somebody has the file for itself, as in journal_mode=DELETE while a COMMIT runs.
      const { errcode } = error as { errcode?: unknown };
      return errcode === 5 || errcode === 6
        ? blind("somebody has locked the file", "Try again when the writer is done.")
        : undefined;
    },
    renew: () => Promise.resolve(),
    [Symbol.asyncDispose]: () => Promise.resolve(),
  };
}

export const name = (text: string): string => `"${text.replaceAll('"', '""')}"`;
