import { conformanceOn } from "../harness/conformance.ts";

conformanceOn("process");
