/** A process that uses a limit on a DuckDB file as fast as it can, and says what it was granted. */
import { DuckDBInstance } from "@duckdb/node-api";
import { type Holdfast, holdfast } from "holdfast";
import { fromDuckdb } from "holdfast/duckdb";
import { quota } from "holdfast/quota";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface DuckdbRushArg {
  readonly url: string;
}

export const limit = 500;

export const uploads = (hf: Holdfast<unknown>) => quota(hf, { name: "uploads", limit });

export async function openDuckdb(url: string) {
  const instance = await DuckDBInstance.create(url);
  const hf = holdfast(fromDuckdb(instance));
  const close = async () => {
    await hf.close();
    instance.closeSync();
  };
  return { hf, close };
}

export default async function rush({ url }: DuckdbRushArg, { send }: WorkerContext): Promise<void> {
  const { hf } = await openDuckdb(url);
  await hf.migrate();
  for (let i = 0; ; i++) {
    const id = `${process.pid}:${i}`;
    const { granted } = await uploads(hf).tryConsume("ann", 1, { id });
    if (granted) send("granted", id);
  }
}
