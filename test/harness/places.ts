import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Backend } from "../backends.ts";
import { createDatabase, unavailable } from "./databases.ts";

export interface Place {
  readonly url: string;
  drop(): Promise<void>;
}

/** A new, empty database for a backend, wherever it keeps its data. */
export async function placeFor({ server }: Backend): Promise<Place> {
  if (server === "process") return { url: "", drop: async () => {} };
  if (server === "file") {
    const folder = await mkdtemp(join(tmpdir(), "holdfast-sqlite-"));
    return { url: join(folder, "test.db"), drop: () => rm(folder, { recursive: true, force: true }) };
  }
  return createDatabase(server);
}

/** Why the backend's server is not there, or undefined if it is. */
export function missing({ server }: Backend): string | undefined {
  return server === "process" || server === "file" ? undefined : unavailable(server);
}
