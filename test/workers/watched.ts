/** Loaded first by the processes of an example: writes down what Holdfast tells of what is done under locks. */
import diagnostics from "node:diagnostics_channel";
import { appendFileSync } from "node:fs";

const file = process.env["HOLDFAST_WATCHED"];
const write = (event: string) => (told: unknown) => {
  if (file) appendFileSync(file, `${JSON.stringify({ event, ...(told as object) })}\n`);
};

diagnostics.subscribe("holdfast:hazard", write("hazard"));
diagnostics.subscribe("holdfast:section:slow", write("slow"));
