import { closeSync, openSync, readSync, statSync } from "node:fs";
import { type Server, fileOf } from "../../server.ts";
import { blind } from "../check.ts";
import type { Patient } from "../patient.ts";

export interface SqlitePatient extends Patient {
  readonly file: string;
  /** Of the file, or of one beside it; 0 if it is not there. */
  size(suffix?: string): number;
  /** The first bytes of one beside it; fewer, or none, if there are no more. */
  head(suffix: string, bytes: number): Buffer;
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
    head(suffix, bytes) {
      if (!statSync(`${file}${suffix}`, { throwIfNoEntry: false })) return Buffer.alloc(0);
      const opened = openSync(`${file}${suffix}`, "r");
      try {
        const found = Buffer.alloc(bytes);
        return found.subarray(0, readSync(opened, found, 0, bytes, 0));
      } finally {
        closeSync(opened);
      }
    },
    hindrance(error) {
      // SQLITE_BUSY, SQLITE_LOCKED: somebody has the file for itself, as in journal_mode=DELETE while a COMMIT runs.
      const { errcode } = error as { errcode?: unknown };
      return errcode === 5 || errcode === 6
        ? blind("somebody has locked the file", "Try again when the writer is done.")
        : undefined;
    },
    renew: () => Promise.resolve(),
  };
}

export const name = (text: string): string => `"${text.replaceAll('"', '""')}"`;
