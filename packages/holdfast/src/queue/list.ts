import { placeOf, send } from "../core/calls.ts";
import { checkTexts } from "../core/input.ts";
import { checkNames } from "../core/options.ts";
import type { QueueInfo } from "../core/queues.ts";
import { deskOf } from "./desk.ts";

/** All queues of this database, or those of these names that are there, by name. Nothing is made by asking. */
export async function queues(
  hf: object,
  options: { readonly names?: readonly string[] } = {},
): Promise<readonly QueueInfo[]> {
  checkNames("queues", options, new Set(["names"]));
  const { names } = options;
  checkTexts("queues", "names", names);
  const desk = deskOf(hf);
  const place = placeOf(desk.home, {}, "queues");
  return send(desk.home, place, { names: ["queues"] }, (connection) => desk.store.list(connection, names));
}
