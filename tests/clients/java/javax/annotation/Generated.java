package javax.annotation;

import java.lang.annotation.Retention;
import java.lang.annotation.RetentionPolicy;

/** The annotation that Java had until version 8 and that generated code still carries. */
@Retention(RetentionPolicy.SOURCE)
public @interface Generated {
    String[] value();
    String date() default "";
    String comments() default "";
}
