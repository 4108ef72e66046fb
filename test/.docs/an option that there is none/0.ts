import { hf } from "../../docs/reader.ts";
import { key } from "holdfast";
await hf.transaction({ locks: key("a", 1) }, async () => {});
export {};
