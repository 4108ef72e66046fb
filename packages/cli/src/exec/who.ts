/** Who has a key, in one phrase. */
import { FileBusyError, type Key } from "holdfast";
import { type Entry, look } from "../locks/look.ts";
import { shown } from "../text.ts";
import type { Server } from "../server.ts";
import { age } from "../terminal.ts";
import { described } from "./record.ts";

/** Whether it is a lock, or a lease, of this key. */
export function isOf({ name }: Entry, { name: of, form }: Key): boolean {
  if (form.kind === "name" && name.endsWith(`bigint ${form.hash})`)) return true;
  return name === of || (form.kind === "name" && name === `bigint ${form.hash}`);
}

/** The session that has these keys, or whoever has their lease. Empty: it cannot be seen. */
export async function sessionOf(server: Server, keys: readonly Key[]): Promise<string> {
  const { entries } = await look(server).catch(() => ({ entries: [] }));
  const held = entries.filter((entry) => entry.granted && keys.some((key) => isOf(entry, key)));
  return (held.find(({ kind }) => kind !== "lease") ?? held[0])?.session.id ?? "";
}

/** "held by 4711 (api, idle in transaction, for 12 s)"; never throws: it is said besides something else. */
export async function holderOf(server: Server, keys: readonly Key[], why?: unknown): Promise<string> {
  if (why instanceof FileBusyError) return "not to be had, since somebody else writes to the file";
  try {
    const { entries, at } = await look(server);
    const holder = entries.find((entry) => entry.granted && keys.some((key) => isOf(entry, key)));
    if (!holder) return "held by somebody who cannot be seen";
    const { id, application, state, since, exec } = holder.session;
    if (exec)
      return `held by ${shown(id)} (${shown(`holdfast exec${exec.run ? `: ${described(exec.run)}, for ${age(exec.run.ageMs)}` : ""}`)})`;
    const about = [application, state, since ? `for ${age(at.getTime() - since.getTime())}` : ""].filter(
      (word) => word !== "",
    );
    return `held by ${shown(id)} (${shown(about.join(", "))})`;
  } catch {
    return "held by somebody who cannot be seen";
  }
}
