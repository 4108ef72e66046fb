/** A process that makes one call, on tables that do not keep what is written to them. */
import { type Holdfast, holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { Pool } from "pg";

const calls: Readonly<Record<string, (hf: Holdfast<unknown>) => Promise<unknown>>> = {
  lease: (hf) => hf.lease(key("hidden", "rows"), { wait: "skip" }),
  schedule: (hf) => schedule(hf, "hidden", { every: "1 day" }, async () => {}).runNow(),
  quota: (hf) => quota(hf, { name: "hidden", limit: 5 }).consume("rows"),
};

export default async function hiddenRows({ url, call }: { url: string; call: string }): Promise<void> {
  const hf = holdfast(fromPg(new Pool({ connectionString: url }))) as Holdfast<unknown>;
  await calls[call]?.(hf);
}
