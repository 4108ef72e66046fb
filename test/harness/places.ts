import { statfsSync } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Backend } from "../backends.ts";
import { createDatabase, unavailable } from "./databases.ts";
import { type Site, openNamed, serverOf } from "./sites.ts";

export interface Place {
  readonly url: string;
  drop(): Promise<void>;
}

/** In memory, where there is room: a COMMIT without WAL asks the disk four times, and some take 20 ms for each. */
function roomyFolder(): string {
  try {
    const { bavail, bsize } = statfsSync("/dev/shm");
    if (bavail * bsize > 2 ** 30) return "/dev/shm";
  } catch {
    // There is none.
  }
  return tmpdir();
}

/** A new, empty database for a backend, wherever it keeps its data. */
export async function placeFor({ server }: Pick<Backend, "server">): Promise<Place> {
  if (server === "process") return { url: "", drop: async () => {} };
  if (server === "file") {
    const folder = await mkdtemp(join(roomyFolder(), "holdfast-sqlite-"));
    return { url: join(folder, "test.db"), drop: () => rm(folder, { recursive: true, force: true }) };
  }
  return createDatabase(server);
}

/** Why the backend's server is not there, or undefined if it is. */
export function missing({ server }: Pick<Backend, "server">): string | undefined {
  return server === "process" || server === "file" ? undefined : unavailable(server);
}

/** In a new database of a backend, with the tables of ours. */
export async function within<T>(backend: string, body: (url: string, site: Site) => Promise<T>): Promise<T> {
  const place = await placeFor({ server: serverOf(backend) });
  try {
    const site = await openNamed(backend, place.url);
    try {
      await site.hf.migrate();
      return await body(place.url, site);
    } finally {
      await site.close();
    }
  } finally {
    await place.drop();
  }
}

/** Why there is no server for a backend in this run, or undefined if there is one. */
export const missingFor = (backend: string): string | undefined => missing({ server: serverOf(backend) });
