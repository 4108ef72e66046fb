/** A database of the run's own on somebody's PostgreSQL: a copy of theirs, or an empty one. */
import { describe } from "../describe.ts";
import { Failure } from "../failure.ts";
import { type OwnDatabase, quoted } from "../own-database.ts";
import type { Server } from "../server.ts";
import { plural } from "../text.ts";
import { listOf, sessionsIn } from "./sessions.ts";

/** Larger ones take long to copy, and room that somebody may need. */
const mostBytes = 1024 ** 3;

const elsewhere =
  "--empty takes an empty database in place of a copy; and if none is named (HOLDFAST_URL= DATABASE_URL= holdfast race …), it runs on a PostgreSQL of its own";

export async function makePostgres(server: Server, own: OwnDatabase, empty: boolean): Promise<void> {
  const [it] = await server.query(
    `SELECT current_database() AS name, rolsuper OR rolcreatedb AS creates, rolname AS user, pg_get_userbyid(d.datdba) AS owner,
      rolsuper OR d.datistemplate OR pg_has_role(d.datdba, 'USAGE') AS copies, pg_database_size(d.oid)::float8 AS bytes
      FROM pg_roles, pg_database d WHERE rolname = current_user AND datname = current_database()`,
  );
  const name = String(it?.["name"]);
  if (it?.["creates"] !== true)
    throw new Failure(
      `${server.shown}: ${String(it?.["user"])} may not create a database, and race runs in one of its own: ALTER ROLE ${String(it?.["user"])} CREATEDB. If no database is named (HOLDFAST_URL= DATABASE_URL= holdfast race …), it runs on a PostgreSQL of its own.`,
    );
  if (!empty) {
    if (it["copies"] !== true)
      throw new Failure(
        `${server.shown}: ${String(it["user"])} may not copy "${name}", which belongs to ${String(it["owner"])}. Name a database that is ${String(it["user"])}'s own; ${elsewhere}.`,
      );
    const bytes = Number(it["bytes"]);
    if (bytes > mostBytes)
      throw new Failure(
        `"${name}" has ${(bytes / 1024 ** 3).toFixed(1)} GB, and race copies at most ${mostBytes / 1024 ** 3} GB. Name one with less in it; ${elsewhere}.`,
      );
  }
  // The session that asks is not counted by the server: there must be no other, of ours neither.
  if (!empty) await refuseUsed(server, name);
  await create(server, own, empty ? "template0" : name);
  if (!empty) await settings(server, own);
}

async function refuseUsed(server: Server, name: string): Promise<void> {
  const others = (await sessionsIn(server, "postgres", name)).filter(({ self }) => !self);
  if (others.length > 0) throw used(name, listOf(others), others.length);
}

function used(name: string, who: string, n: number, cause?: unknown): Failure {
  return new Failure(
    `"${name}" is in use (${who}), and PostgreSQL copies a database only while nobody is in it: end ${n === 1 ? "that session" : plural(n, "session")} first. ${elsewhere[0]?.toUpperCase()}${elsewhere.slice(1)}.`,
    { cause },
  );
}

async function create(server: Server, own: OwnDatabase, template: string): Promise<void> {
  try {
    await own.make(() =>
      server.run(`CREATE DATABASE ${quoted(server, own.name)} TEMPLATE ${quoted(server, template)}`),
    );
  } catch (error) {
    // Somebody has come since it was looked.
    if ((error as { code?: unknown }).code === "55006")
      throw used(template, "somebody has just come", 1, error);
    throw new Failure(`Could not make a database of its own on ${server.shown}: ${describe(error)}.`, {
      cause: error,
    });
  }
}

/** What was set for the database is not copied with it: as it counts for this user. */
async function settings(server: Server, { name }: OwnDatabase): Promise<void> {
  const rows = await server.query(
    `SELECT DISTINCT split_part(setting, '=', 1) AS name FROM pg_db_role_setting s, unnest(s.setconfig) setting
      WHERE s.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND s.setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = current_user))`,
  );
  for (const row of rows)
    await server.run(
      `ALTER DATABASE ${quoted(server, name)} SET ${quoted(server, String(row["name"]))} FROM CURRENT`,
    );
}
